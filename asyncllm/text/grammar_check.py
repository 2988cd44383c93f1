"""Grammars tried out in a process of their own: one that takes for ever or overflows the stack ends here.

A child process, run by its path, so it imports nothing of ours. One JSON line in, one out; see grammars.py.

Measured with llguidance 1.9: 5,000 Lark rules in a chain overflow an 8 MB stack, 300 intersected patterns take
minutes, and what they do to a process cannot be caught in it. Everything else fails by its own limits, with words.
"""

import contextlib
import json
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

_MEMORY_BYTES = 2 << 30
# What runs of white space between JSON's parts may be: without a bound weak models stay in them to their limit.
_WHITE_SPACE = {"whitespace_pattern": r"( |\n {0,24}|\n\t{0,8})?"}


class _Bytes:
    """The smallest vocabulary that can write everything: the bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def made(kind: str, source: str, frame: str) -> str:
    """The grammar as llguidance reads it: `source`, or what `frame` (Lark) has around its @body."""
    if kind == "json":
        options = {"x-guidance": _WHITE_SPACE}
        part: dict[str, Any] = {"json_schema": json.loads(source) | options}
    elif kind == "regex":
        part = {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]}
    elif kind == "choice":
        part = {"lark_grammar": "start: " + " | ".join([json.dumps(text) for text in json.loads(source)])}
    else:
        part = {"lark_grammar": gbnf_to_lark(source) if kind == "ebnf" else source}
    parts = [{"lark_grammar": frame}, {"name": "body", **part}] if frame else [part]
    return json.dumps({"grammars": parts})


def limits() -> LLParserLimits:
    """Of one grammar, here and where it is used: 7 ms of a step, 50 MB of states."""
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


def tried(tokenizer: LLTokenizer, kind: str, source: str, frame: str) -> tuple[str, str]:
    """The grammar and why it cannot be used. Behind reasoning that may go on for ever its own impossibility would not
    be seen, so it is tried alone first."""
    if frame and source and (reason := problem(tokenizer, made(kind, source, ""))):
        return "", reason
    grammar = made(kind, source, frame)
    return grammar, problem(tokenizer, grammar)


def problem(tokenizer: LLTokenizer, grammar: str) -> str:
    """Why it cannot be used; "" if it can."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        matcher.try_consume_tokens([ord("{")])
    return str(matcher.get_error()) if matcher.is_error() else ""


def main() -> None:
    """Answer until stdin ends, or a grammar has taken as many seconds as the only argument says."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows; or a lower limit is set already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[256])
    print("ready", flush=True)
    for line in sys.stdin:
        grammar = ""
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # processor time, after which it ends by SIGPROF
        try:
            grammar, reason = tried(tokenizer, *json.loads(line))
        except Exception as error:  # the library raises bare Exception where a grammar has no root
            reason = str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([grammar, reason]), flush=True)


if __name__ == "__main__":
    main()
