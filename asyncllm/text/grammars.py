"""What an answer must look like, compiled: schemas, patterns, choices and grammars, by llguidance.

Compiled in a worker thread, after a process of its own has tried the grammar out; matchers belong to the GPU thread.
It never knows requests, steps or tensors.

llguidance, not xgrammar: on Qwen3's 151,669 ids a mask takes 2.8 us at the median and 6.6 on average against 16 and
13, 256 of them 1.4 ms against 3.4 (one core). An enum of 50,000 strings and a literal of 1 MB compile in 0.12 and
0.1 s, where xgrammar 0.2.9 was stopped after 40; it says which keyword of a schema it does not know instead of
ignoring it, and does not import torch.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ..errors import GrammarUnchecked, InvalidRequest
from ..types import GrammarSpec, Matcher
from .grammar_check import limits
from .notation import idle_part, in_words, is_ebnf, json_holds_options
from .tokenizer import Tokenizer

CHECK_S = 5.0  # of processor time, for one grammar; nearly all take milliseconds
_PATIENCE = 2  # times that, by the clock
_START_S = 30.0  # of the process that checks
_MAX_CACHED = 64
_MAX_CACHED_CHARS = 8 << 20
_MAX_SOURCE_CHARS = {"json": 2 << 20, "choice": 2 << 20, "regex": 1 << 16, "grammar": 1 << 16, "lark": 4 << 20}


class Grammar:
    """A compiled grammar. `matcher()` makes the state of one answer, in a microsecond."""

    def __init__(self, start: LLMatcher, param: str) -> None:
        self._start = start
        self._param = param
        self.is_worn = False  # its copies share what its lexer has met, and the limit of that

    def wear_out(self) -> None:
        self.is_worn = True

    def failure(self, matcher: Matcher) -> InvalidRequest:
        reason = in_words(matcher.get_error())[:400]
        return InvalidRequest.of(self._param, f"cannot be kept to any further: {reason}")

    def matcher(self) -> LLMatcher:
        return self._start.deep_copy()


class Grammars:
    """The compiler of one model's vocabulary, and what it has compiled.

    Made at start: it holds the GIL for half a second over 150,000 ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._words = _Words(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(TokenizerWrapper(self._words), eos_token=list(tokenizer.eos_ids) or None)
        self._words.greedy = self._tokenizer.greedy_tokenize
        self._check = Check()
        self._cached: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # one grammar at a time

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> "Grammars | None":
        """None where the tokenizer's tokens have no spelling of their own, or there is none that ends an answer."""
        return cls(tokenizer, vocab_size) if tokenizer.table is not None and tokenizer.eos_ids else None

    def masker(self, num_threads: int) -> "Masker":
        """For the GPU thread."""
        return Masker(num_threads)

    def find(self, spec: GrammarSpec) -> Grammar | None:
        """If it has been compiled lately."""
        if (grammar := self._cached.get(spec)) is None or grammar.is_worn:
            return None
        self._cached[spec] = self._cached.pop(spec, grammar)  # the last to go; another thread may have dropped it
        return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Worker thread; may take CHECK_S, and twice that where the machine is busy.

        Raises:
            InvalidRequest: the grammar is wrong, impossible or too large, and why. GrammarUnchecked: not now.
        """
        with self._lock:
            if (grammar := self._cached.get(spec)) is None or grammar.is_worn:
                grammar = self._cached[spec] = Grammar(self._compiled(spec), spec.param)
                self._evict()
        return grammar

    def _evict(self) -> None:
        """The ones that were asked for longest ago, but never the newest. A compiled grammar takes some ten times its
        source."""
        while len(self._cached) > 1 and (
            len(self._cached) > _MAX_CACHED
            or sum([len(spec.source) for spec in list(self._cached)]) > _MAX_CACHED_CHARS
        ):
            self._cached.popitem(last=False)

    def close(self) -> None:
        """Also while another thread compiles: its grammar fails."""
        self._check.kill()
        if self._lock.acquire(timeout=1.0):
            self._check.close()
            self._lock.release()

    def _compiled(self, spec: GrammarSpec) -> LLMatcher:
        if len(spec.source) > (most := _MAX_SOURCE_CHARS[spec.kind]):
            raise InvalidRequest.of(spec.param, f"has more than {most} characters")
        grammar, reason = self._check.ask(_read(spec))
        if not reason:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            if not matcher.is_error():
                matcher.deep_copy().compute_bitmask()  # the first mask takes longest: not in a step
            reason = matcher.get_error()
        if reason:
            message = in_words(reason, has_places=spec.kind == "grammar")
            raise InvalidRequest.of(spec.param, f"cannot be used: {message[:400]}")
        return matcher


def _read(spec: GrammarSpec) -> GrammarSpec:
    """The same, in a notation that llguidance knows and can act on.

    Raises:
        InvalidRequest: it cannot act on some of it.
    """
    if spec.kind == "json" and json_holds_options(spec.source):
        raise InvalidRequest.of(spec.param, "cannot be used: 'x-guidance' has no effect here; leave it out")
    if spec.kind != "grammar":
        return spec
    if is_ebnf(spec.source):
        return msgspec.structs.replace(spec, kind="ebnf")
    if reason := idle_part(spec.source):
        raise InvalidRequest.of(spec.param, f"cannot be used: {reason}")
    return msgspec.structs.replace(spec, kind="lark")


class _Words:
    """Our tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        assert tokenizer.table is not None
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = tokenizer.table[:vocab_size]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self.greedy: Any = None
        self._tokenizer = tokenizer
        self._known: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        """How the model would write this: where a text is forced, the mask wants its usual tokens. Any thread."""
        data = text.encode() if isinstance(text, str) else text
        if (ids := self._known.get(data)) is None:
            ids = self._tokenizer.encode_inside(data.decode("utf-8", "replace"))
            if max(ids, default=0) >= len(self.tokens) or b"".join([self.tokens[i] for i in ids]) != data:
                ids = self.greedy(data.decode("utf-8", "replace"))
            if len(self._known) < 1 << 16:
                self._known[data] = ids
        return ids


class Masker:
    """Fills masks and moves matchers on, many in one call that lets the GIL go. GPU thread."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads=num_threads)
        self._row_s = 0.0  # running mean

    def fill(self, rows: list[tuple[LLMatcher, int]], masks: NDArray[np.int32], budget_s: float) -> int:
        """masks: [num_rows, ceil(vocab / 32)]; bit i of a row says whether its matcher allows id i.

        By groups that should take a quarter of the time: nearly always that is all of them at once.
        """
        num_rows, num_words = masks.shape
        began_s = now_s = time.monotonic()
        num_filled = 0
        while num_filled < len(rows) and now_s - began_s < budget_s:
            size = int(max(8, budget_s / 4 / max(self._row_s, 1e-7)))
            group = rows[num_filled : num_filled + size]
            self._executor.unsafe_compute_mask_ptr(group, masks.ctypes.data, 4 * num_words, num_rows)
            num_filled += len(group)
            group_s, now_s = time.monotonic() - now_s, time.monotonic()
            self._row_s += 0.2 * (group_s / len(group) - self._row_s)
        return num_filled

    def accept(self, tokens: list[tuple[LLMatcher, int]]) -> list[bool]:
        """Move each matcher over its token. False: it fits no more, or cannot be followed."""
        return list(self._executor.consume_token_par(tokens))


class Check:
    """The process that tries grammars out, started when there is one. Worker thread; one caller at a time."""

    def __init__(self, seconds: float = CHECK_S) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def ask(self, spec: GrammarSpec) -> tuple[str, str]:
        """The grammar as llguidance reads it, and why it cannot be used ("" if it can).

        Raises:
            GrammarUnchecked: the process was stopped, killed or starved.
        """
        process = self._running()
        question = json.dumps([spec.kind, spec.source, spec.frame])
        if answer := _said(process, question, self._seconds * _PATIENCE):
            grammar, reason = json.loads(answer)
            return grammar, reason
        self.close()
        # A grammar that goes beyond the limits ends the process by other signals, its time by SIGPROF.
        if process.returncode == -signal.SIGKILL:
            raise GrammarUnchecked("the grammar could not be tried out in time; the request can be sent again")
        return "", "it takes too long, or too much memory, to compile"

    def kill(self) -> None:
        """Any thread: whoever waits for an answer gets none."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # reads to the end and closes

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it died while nobody asked, as of the kernel's want of memory: no grammar's fault
        if self._process is None:
            # By its path and without that path's folder: the program may have been started from anywhere.
            path = str(Path(__file__).with_name("grammar_check.py"))
            command = [sys.executable, "-P", path, str(self._seconds)]
            pipe = subprocess.PIPE
            # In a session of its own: Ctrl-C in a terminal is for the server.
            self._process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, start_new_session=True)
            if _said(self._process, None, _START_S) != "ready\n":
                self.close()
                raise GrammarUnchecked("grammars cannot be tried out: the process for it does not start")
        return self._process


def _said(process: "subprocess.Popen[str]", question: str | None, seconds: float) -> str:
    """The next line it writes; "" if it ends instead, or is killed because it takes longer, be it to read."""
    assert process.stdin is not None and process.stdout is not None
    overdue = threading.Timer(seconds, process.kill)
    overdue.start()
    try:
        if question is not None:
            print(question, file=process.stdin, flush=True)
        line = process.stdout.readline()
    except OSError:
        return ""
    finally:
        overdue.cancel()
    return line if line.endswith("\n") else ""
