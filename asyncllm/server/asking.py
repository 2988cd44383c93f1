"""What stands before every answer to a conversation, whichever API asked: its prompt, its sampling, its tools.

Loop thread. It never knows how an API says any of it: each makes a ChatRequest of its own request.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ..errors import ContextTooLong, InvalidRequest
from ..llm import AsyncLLM
from ..types import GrammarSpec, SamplingParams
from ..wire import requests
from ..wire.formats import grammar_spec
from ..wire.names import Names
from ..wire.requests import ChatRequest
from ..wire.tools import Function, Tool, ToolUse, tool_use
from ..wire.variables import EFFORT_VARIABLES, template_variables
from .parting import Parting, parting


class Asked(msgspec.Struct, frozen=True):
    """A conversation that can be submitted."""

    prompt_ids: list[int]
    params: SamplingParams
    parting: Parting | None  # None: the answer is content, whatever it says

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that the answer's text must have."""
        return () if self.parting is None else self.parting.shown


async def ask(llm: AsyncLLM, body: ChatRequest, messages: list[dict[str, Any]]) -> Asked:
    """Everything that can be refused is refused here, before the engine hears of it.

    Raises:
        InvalidRequest: naming the field as chat has it; ContextTooLong among them.
    """
    params = requests.chat_params(body, llm.sampling_defaults)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    spec = grammar_spec(body)
    prompt_ids = await prompt_of(llm, body, messages, use)
    parted = parting(llm, body, prompt_ids, use)
    try:
        forced = llm.words.forced(prompt_ids, spec, **_calls(use))
        params = await llm.compiled(msgspec.structs.replace(params, grammar=forced))
    except InvalidRequest as error:
        if error.param == "tools":
            await _blame_tool(llm, body.tools or [])
        raise
    return Asked(prompt_ids, params, parted)


async def _blame_tool(llm: AsyncLLM, tools: list[Tool]) -> None:
    """Which function's parameters cannot be kept to.

    Raises:
        InvalidRequest: naming them.
    """
    for i, tool in enumerate(tools):
        if tool.function is not None and tool.function.parameters is not None:
            path = f"tools[{i}].function.parameters"
            spec = GrammarSpec("json", json.dumps(tool.function.parameters), path)
            await llm.compiled(SamplingParams(grammar=spec))


def _calls(use: ToolUse | None) -> dict[str, Any]:
    """What an answer may or must call, as AsyncLLM.forced takes it."""
    if use is None:
        return {}
    strict = any(function.strict for function in use.functions)
    functions = [(function.name, _kept_to(function, use)) for function in use.functions]
    return {"functions": functions, "must_call": use.must_call, "one_call": use.one_call, "strict": strict}


def _kept_to(function: Function, use: ToolUse) -> dict[str, Any] | None:
    """The schema of its arguments; any object, where it need not be called and is not strict."""
    return function.parameters if use.must_call or function.strict else {"type": "object"}


async def ask_what_fits(
    llm: AsyncLLM, body: ChatRequest, system: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> Asked:
    """ask(), without as many of the oldest messages as leave no room for the answer, or half of the context for it.

    Raises:
        InvalidRequest: as ask(); ContextTooLong if the last turn alone is too long.
    """
    room = min(body.max_tokens or 1, llm.limits.max_model_len // 2)

    async def asked_from(start: int) -> Asked | None:
        try:
            asked = await ask(llm, body, system + messages[start:])
        except ContextTooLong:
            return None
        return asked if len(asked.prompt_ids) + room <= llm.limits.max_model_len else None

    # A result without its call is none that templates render: turns begin elsewhere.
    starts = [i for i, message in enumerate(messages) if message["role"] != "tool"] or [0]
    low, high, best = 0, len(starts) - 1, None
    while low <= high:  # the longest end of the conversation that fits; the whole is tried first
        middle = (low + high) // 2 if best is not None or low else 0
        if (asked := await asked_from(starts[middle])) is None:
            low = middle + 1
        else:
            best, high = asked, middle - 1
    return best or await ask(llm, body, system + messages[starts[-1] :])


async def prompt_of(
    llm: AsyncLLM, body: ChatRequest, messages: list[dict[str, Any]], use: ToolUse | None
) -> list[int]:
    """The conversation's ids, as an answer to it would be asked for."""
    tools = None if use is None else use.for_template()
    variables, ending = _variables(llm, body), requests.ending(body)
    return await llm.encode_chat(messages, tools=tools, variables=variables, ending=ending)


@contextmanager
def naming(names: Names) -> Iterator[None]:
    """What is refused in here is told by these names of fields."""
    try:
        yield
    except InvalidRequest as error:
        raise error.renamed(names.of) from None


def call_id_chars(llm: AsyncLLM) -> int | None:
    """How long the model's template wants calls' ids, if it does."""
    calls = None if llm.chat_template is None else llm.chat_template.form.calls
    return None if calls is None else calls.id_chars


def _variables(llm: AsyncLLM, body: ChatRequest) -> dict[str, Any]:
    """What the request tells the template.

    Raises:
        InvalidRequest: an effort that the template does not look at.
    """
    template, asks = llm.chat_template, body.reasoning_effort not in (None, "none")
    if asks and template is not None and not template.reads(*EFFORT_VARIABLES):
        raise InvalidRequest("this model reasons as it does: its template takes no effort", "reasoning_effort")
    return template_variables(body.reasoning_effort, body.chat_template_kwargs)
