"""A model's chat template: messages to the text the model was trained on.

Any thread (frozen after start; long prompts in a worker thread). It never knows requests beyond their messages.
Only the model folder's template is ever run, in jinja's sandbox; a request cannot bring its own.
"""

import json
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest, ModelError
from .answer import AnswerForm
from .telling import calls_told, tools_told
from .tokenizer import Tokenizer, read_json, token_text

MAX_RENDERED_CHARS = 64 << 20  # twice the largest body
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

Message = dict[str, Any]
# How a prompt ends: in the opening of an answer, after the last message, or inside it, to be continued.
Ending = Literal["opening", "closed", "continued"]


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, form: AnswerForm | None = None
    ) -> None:
        """Compile. `form`: how the model writes what is not plain content, if not as the template shows.

        Raises:
            ModelError: the template has a syntax error.
        """
        self.source = source
        self.form = form or AnswerForm.of(source)
        self._knows_tools = self.reads("tools")
        self._knows_calls = self.reads("tools", "tool_calls")
        self._special_tokens = special_tokens or {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    @classmethod
    def from_folder(
        cls, path: str | Path, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ChatTemplate | None":
        """The folder's template, or None when it has none. The parsers are tools.FORMS, reasoning.TAGS, none or auto.

        Raises:
            ModelError: a template that does not compile, or a file that cannot be read.
        """
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        if source is None:
            return None
        texts = {name: token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        form = AnswerForm.of(source, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        return cls(source, {name: text for name, text in texts.items() if text is not None}, form)

    def reads(self, *variables: str) -> bool:
        """Whether it looks at one of these."""
        return any(variable in self.source for variable in variables)

    def encode(
        self,
        messages: list[Message],
        tokenizer: Tokenizer,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        ending: Ending = "opening",
        max_len: int | None = None,
    ) -> list[int]:
        """The prompt of these messages as ids, ready for the answer. `variables` are further ones of the template.

        Control tokens come from the template alone: their text inside a message stays text.

        Raises:
            InvalidRequest: the template refuses the messages (its own sentence) or cannot render them.
            ContextTooLong: more than max_len ids.
        """
        try:
            if not self._knows_calls and any(message.get("tool_calls") for message in messages):
                messages = calls_told(messages)
            if tools and not self._knows_tools:
                messages, tools = tools_told(messages, tools), None
            rendered = self.render(messages, tools, variables, ending)
            tokenizer.check_chars(len(rendered), max_len)  # first: looking for marks in 20 MB holds the GIL for 0.4 s
            marked, mark = tokenizer.control.mark([*messages, *(tools or ()), variables or {}])
            if mark:
                rest = marked[len(messages) : -1]
                rendered = self.render(marked[: len(messages)], rest if tools else None, marked[-1], ending)
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", "messages") from None
        return tokenizer.encode_rendered(rendered, mark=mark, max_len=max_len)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        ending: Ending = "opening",
    ) -> str:
        """The text that the template makes of these messages.

        Raises:
            InvalidRequest: the template refuses the messages (its own sentence) or cannot render them.
        """
        ours = {"tools": tools, "messages": messages, "add_generation_prompt": ending == "opening"}
        context: dict[str, Any] = {"documents": None, **(variables or {}), **ours, **self._special_tokens}
        parts: list[str] = []
        room = MAX_RENDERED_CHARS
        try:
            for part in self._template.generate(context):  # not by name: a variable may be called self
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise InvalidRequest("the chat template makes too much text of these messages", "messages")
        except _Refusal as refusal:
            raise InvalidRequest(str(refusal), "messages") from None
        except (InvalidRequest, RecursionError):
            raise
        except Exception as error:  # whatever a template can run into: undefined names, wrong types, the sandbox
            message = f"the model's chat template cannot render these messages: {_reason(error)}"
            raise InvalidRequest(message, "messages") from error
        text = "".join(parts)
        return _cut_open(text, messages) if ending == "continued" else text


def _reason(error: Exception) -> str:
    """Jinja's own sentences name what the template wants; Python's may show whatever value it stumbled over."""
    if isinstance(error, jinja2.TemplateError):
        return str(error)
    frames = traceback.walk_tb(error.__traceback__)
    lines = [number for frame, number in frames if frame.f_code.co_filename == "<template>"]
    return f"a {type(error).__name__} in its line {lines[-1]}" if lines else f"a {type(error).__name__}"


def _cut_open(rendered: str, messages: list[Message]) -> str:
    """Without what the template puts behind the last message, so that the model goes on with it.

    Raises:
        InvalidRequest: the last message is not the assistant's, is empty, or the template does not show it.
    """
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        message = "only a last message of the assistant, with some text, can be continued"
        raise InvalidRequest(message, "continue_final_message")
    begin = rendered.rfind(content.strip())
    if begin < 0:
        raise InvalidRequest("the model's chat template does not show the last message", "continue_final_message")
    # Its own white space at the end, if the template kept it.
    whole = content.lstrip()
    return rendered[: begin + len(whole if rendered.startswith(whole, begin) else whole.rstrip())]


class _Refusal(jinja2.TemplateError):
    """A template's raise_exception."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to multiply text and lists into gigabytes (jinja offers only this hook)."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        is_number = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (is_number and abs(right) <= 64):
            raise SecurityError("the power would be too large a number")
        if operator == "*" and not is_number and _size(left) * _size(right) > MAX_RENDERED_CHARS:
            raise SecurityError("the product would be too long")
        return super().call_binop(context, operator, left, right)


def _size(factor: Any) -> int:
    return factor if isinstance(factor, int) else len(factor)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks answers for training; here it only wraps its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own spelling)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: Any) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As models are trained with: no HTML escapes, which jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json, or tokenizer_config.json's: the first there is."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (source := _chosen(read_json(folder / "chat_template.json").get("chat_template"))) is not None:
        return source
    return _chosen(config.get("chat_template"))


def _chosen(templates: Any) -> str | None:
    """A template, or the default one of a list of named templates."""
    if isinstance(templates, list):
        named = {entry["name"]: entry["template"] for entry in templates}
        templates = named.get("default", next(iter(named.values()), None))
    return templates if isinstance(templates, str) else None
