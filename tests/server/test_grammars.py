"""Structured output and demanded calls over HTTP: kept to, refused by name, never ignored (GRAM-1, GRAM-3, GRAM-4)."""

import asyncio
import json
import re
import signal
from typing import Any

import pytest

from asyncllm.text.grammars import CHECK_S

from ..text import toys
from .conftest import BOTH, Serve, endless, refused
from .test_tools import LONG, TOOLS, calls, function, message

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 99, "minimum": 10}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}}


@BOTH
async def test_an_answer_keeps_to_its_schema_and_ends_with_it(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG) as served:
        answer = await served.chat(stream=stream, **schema(PERSON, strict=True))
        person = json.loads(answer.text())
        assert person["name"] in ("Ada", "Bob") and 10 <= person["age"] <= 99 and len(person) == 2
        assert answer.finish_reason == "stop"
        assert (await served.chat(stream=stream, **schema(PERSON))).text() == answer.text()  # cached


@BOTH
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", 'no "\n🙂']}}, 'yes|no "\n🙂'),
        ({"structured_outputs": {"json": PERSON}}, r"\{.*\}"),
        ({"structured_outputs": {"grammar": 'start: x x\nx: "p" | "q"'}}, "[pq][pq]"),
        ({"guided_json": json.dumps(PERSON)}, r"\{.*\}"),
        ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"guided_choice": ["x1", "x2"]}, "x[12]"),
        ({"guided_grammar": 'root ::= "k" ("l" | "m")'}, "k[lm]"),
        ({"regex": "(z|y){3}!"}, "[zy]{3}!"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": {"const": 7}}, "7"),
    ],
)
async def test_every_name_for_a_demand(serve: Serve, stream: bool, fields: dict[str, Any], pattern: str | None) -> None:
    async with serve(endless, **LONG) as served:
        for ask in (served.chat, served.complete):
            answer = await ask(stream=stream, max_tokens=200, **fields)
            assert answer.status == 200, answer.raw
            assert re.fullmatch(pattern or "[a-z]+", answer.text(), re.DOTALL), answer.text()


GRAM_1 = [
    {"type": "object", "properties": {"foo": "bar"}},
    {"type": "strng"},
    {"type": "object", "required": "a"},
    {"type": "string", "pattern": "(["},
    {"$ref": "#/nowhere"},
    {"$ref": "http://127.0.0.1:1/x"},
    {"$ref": "#"},
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"not": {"type": "string"}},
]


@BOTH
async def test_gram_1_a_wrong_demand_is_a_400_that_names_it(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG) as served:
        path = "response_format.json_schema"
        neighbour = asyncio.create_task(served.complete(max_tokens=200, ignore_eos=True))
        for wrong in GRAM_1:
            answer = await served.chat(stream=stream, **schema(wrong))
            refused(answer, f"{path}.schema")
            assert answer.headers["Content-Type"].startswith("application/json")
        for wrong in ("(", "[z-a]", "(?=x)", "\\1", "x" * (1 << 17)):
            refused(await served.chat(stream=stream, structured_outputs={"regex": wrong}), "structured_outputs.regex")
        for wrong, param in (
            ({"type": "json_schema"}, path),
            ({"type": "json_schema", "json_schema": {"schema": {}}}, f"{path}.name"),
            ({"type": "json_schema", "json_schema": {"name": "x"}}, f"{path}.schema"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}, f"{path}.schema"),
            ({"type": "xml"}, "response_format.type"),
        ):
            refused(await served.chat(stream=stream, response_format=wrong), param)
        for wrong in (
            {},
            {"choice": []},
            {"choice": [""]},
            {"json": "["},
            {"structural_tag": "x"},
            {"grammar": "start: ("},
        ):
            answer = await served.chat(stream=stream, structured_outputs=wrong)
            assert (answer.status, answer.error["param"].split(".")[0]) == (400, "structured_outputs")
        rootless = await served.chat(stream=stream, structured_outputs={"grammar": 'x ::= "a"'})
        refused(rootless, "structured_outputs.grammar")
        assert "root" in rootless.error["message"]  # and not that the process which tries it has ended
        options = {"type": "object", "x-guidance": {"lenient": True}}
        refused(await served.chat(stream=stream, **schema(options)), f"{path}.schema.x-guidance")
        below = {"type": "object", "properties": {"x-guidance": {"type": "integer", "x-guidance": {"lenient": True}}}}
        refused(await served.chat(stream=stream, **schema(below)), f"{path}.schema")
        tools = [function("f"), function("g", parameters=below)]
        answer = await served.chat(stream=stream, tools=tools, tool_choice="required")
        refused(answer, "tools[1].function.parameters")
        assert "'x-guidance' has no effect" in answer.error["message"]
        tool = function("f", parameters=options)
        refused(await served.chat(stream=stream, tools=[tool]), "tools[0].function.parameters.x-guidance")
        for wrong, said in (
            ('start: x\nx[temperature=0.5]: "a"', "'temperature'"), ('start: x\nx[capture]: "a"', "'capture'"),
            ("start: A\nA: /a/ & /b/", "no text fits it"), ("start: <|im_end|>", "names a token"),
        ):  # fmt: skip
            answer = await served.chat(stream=stream, guided_grammar=wrong)
            refused(answer, "guided_grammar")
            assert said in answer.error["message"]
        refused(await served.chat(stream=stream, regex="a", guided_choice=["a"]), "regex")
        assert (await neighbour).finish_reason == "length"
        recursive = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
        assert (await served.chat(stream=stream, max_tokens=8, **schema(recursive))).status == 200
        await served.idle()


async def test_gram_3_what_is_hard_to_compile_costs_nobody_else(serve: Serve) -> None:
    hard: list[dict[str, Any]] = [
        *({"structured_outputs": {"regex": regex}} for regex in (
            "a{1,1000000000}", "(a{1,1000}){1,1000}", "((a|b)*c){50}(d|e){500}", "(a+)+$",
        )),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        schema({"type": "string", "maxLength": 10**9}),
        schema({"enum": [f"value {i}" for i in range(50_000)]}),
        schema({"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(500)]}),
    ]  # fmt: skip
    async with serve(endless, **LONG) as served:
        for fields in hard:
            asked = asyncio.create_task(served.chat(max_tokens=4, **fields))
            await served.alive()
            assert (await asked).status in (200, 400)
        many = [schema({"const": f"number {i}"}) for i in range(50)]
        answers = await asyncio.gather(*[served.chat(max_tokens=2, **fields) for fields in many])
        assert {answer.status for answer in answers} <= {200, 503}
        await served.idle()


async def test_gram_3_what_would_end_the_process_ends_the_checking_one(serve: Serve) -> None:
    """A chain of rules that overflows the stack: 400, and the next grammar finds a new process."""
    chain = "start: r0\n" + "\n".join([f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)]) + '\nr3000: "a"'
    async with serve(endless, **LONG) as served:
        refused(await served.chat(structured_outputs={"grammar": chain}), "structured_outputs.grammar")
        assert (await served.chat(structured_outputs={"regex": "a"})).text() == "a"


async def test_gram_3_who_is_stopped_while_checking_is_nobodys_fault(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        assert (await served.chat(regex="a")).text() == "a"
        check = served.llm.words.grammars._check
        check._process.send_signal(signal.SIGSTOP)
        check._seconds = 0.1
        answer = await served.chat(regex="b")
        assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (503, "grammar_unchecked", "1")
        check._seconds = CHECK_S
        assert (await served.chat(regex="b")).text() == "b"


@BOTH
async def test_gram_4_json_ends_at_its_brace_whatever_the_model_likes(serve: Serve, stream: bool) -> None:
    """A model in love with white space, or with anything else."""
    for letter in ("\n", " ", "\t", "}", '"'):
        async with serve(None, **LONG) as served:
            [token_id] = served.tokenizer.encode(letter)
            served.runner.next_token = lambda context, prompt_len, token_id=token_id: token_id
            answer = await served.chat(stream=stream, max_tokens=300, **schema(PERSON))
            assert answer.finish_reason == "stop"
            assert json.loads(answer.text())["name"] in ("Ada", "Bob")
            assert max(map(len, re.findall(r"\s+", answer.text())), default=0) <= 25
            cut = await served.chat(stream=stream, max_tokens=5, **schema(PERSON))
            assert cut.finish_reason == "length"


@BOTH
@pytest.mark.parametrize("template", [toys.TOOLS, toys.TOOLS.replace("<tool_call>", "[TOOL_CALLS]")])
async def test_a_demanded_call_is_made(serve: Serve, stream: bool, template: str) -> None:
    tools = [*TOOLS, function("point", parameters=PERSON)]
    async with serve(endless, template=template, **LONG) as served:
        named = {"type": "function", "function": {"name": "point"}}
        told = {"stream": stream, "chat_template_kwargs": {"enable_thinking": False}}
        answer = await served.chat(tools=tools, tool_choice=named, **told)
        assert answer.status == 200, answer.raw
        [(name, arguments)] = calls(answer, prefix="")
        assert name == "point" and set(json.loads(arguments)) == {"name", "age"}
        assert answer.finish_reason == "tool_calls" and not message(answer).get("content")
        answer = await served.chat(tools=[TOOLS[1]], tool_choice="required", parallel_tool_calls=False, **told)
        assert calls(answer, prefix="") == [("now", "{}")]


@BOTH
async def test_a_schema_that_cannot_be_kept_is_told_with_its_tool(serve: Serve, stream: bool) -> None:
    tools = [*TOOLS, function("f", parameters={"type": "strng"})]
    async with serve(endless, template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(tools=tools, tool_choice="required", stream=stream)
        refused(answer, "tools[2].function.parameters")
        assert "strng" in answer.error["message"]
        assert (await served.chat(tools=tools, stream=stream, max_tokens=3)).status == 200  # to be told, not kept to


@BOTH
async def test_tool_2_a_demanded_call_that_the_limit_cut(serve: Serve, stream: bool) -> None:
    tools = [
        function(
            "note", parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        )
    ]
    async with serve(endless, template=toys.TOOLS, **LONG) as served:
        for limit in (1, 5, 20, 60, 120):
            answer = await served.chat(tools=tools, tool_choice="required", stream=stream, max_tokens=limit)
            assert answer.finish_reason == "length"


@BOTH
async def test_reasoning_comes_before_what_is_demanded(serve: Serve, stream: bool) -> None:
    async with serve("hm</think>", template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(stream=stream, chat_template_kwargs={"thinking_opened": True}, **schema(PERSON))
        assert message(answer)["reasoning_content"] == "hm"
        assert json.loads(message(answer)["content"])["name"] in ("Ada", "Bob")


async def test_what_nothing_fits_is_refused_behind_reasoning_too(serve: Serve) -> None:
    async with serve("hm</think>", template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(guided_grammar="start: A\nA: /a/ & /b/")
        refused(answer, "guided_grammar")
        assert "no text fits it" in answer.error["message"]


async def test_a_row_with_a_grammar_among_rows_without(serve: Serve) -> None:
    """Each says in company what it says alone."""
    async with serve(endless, **LONG) as served:
        asks = [lambda: served.chat(max_tokens=50), lambda: served.chat(max_tokens=50, **schema(PERSON))]
        alone = [(await ask()).text() for ask in asks]
        together = await asyncio.gather(*[ask() for ask in asks * 4])
        assert [answer.text() for answer in together] == alone * 4
