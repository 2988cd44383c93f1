"""/v1/responses over HTTP: the same answer whole and streamed, kept, cancelled, and come back to."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncllm.server.settings import Settings
from asyncllm.wire.sse import Decoder, Event

from ..text import toys
from .conftest import MODEL, Serve, Served, endless, refused, until

PATH = "/v1/responses"
ROOMY = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16}
OPENING = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


class Reading:
    """One event stream, read event by event; `seen` are their bodies."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.seen: list[dict[str, Any]] = []
        self.raw: list[Event] = []
        self._decoder = Decoder()

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Read until so many events of this type have come."""
        while sum(event["type"] == kind for event in self.seen) < count:
            data = await self.response.content.readany()
            assert data, f"the stream ended without {kind}: {self.seen[-1:]}"
            self._add(data)
        return next(event for event in reversed(self.seen) if event["type"] == kind)

    async def rest(self) -> list[dict[str, Any]]:
        self._add(await self.response.content.read())
        return self.seen

    def text(self) -> str:
        return "".join(event["delta"] for event in self.seen if event["type"] == "response.output_text.delta")

    def _add(self, data: bytes) -> None:
        events = self._decoder.feed(data)
        self.raw += events
        self.seen += [json.loads(event.data) for event in events]
        assert [event.type for event in self.raw] == [event["type"] for event in self.seen]


@asynccontextmanager
async def reading(served: Served, **fields: Any) -> AsyncIterator[Reading]:
    body = {"input": "hi", "temperature": 0, "stream": True} | fields
    async with served.session.post(served.url + PATH, json=body) as response:
        assert response.status == 200, await response.text()
        yield Reading(response)


@asynccontextmanager
async def again(served: Served, path: str, **headers: str) -> AsyncIterator[Reading]:
    async with served.session.get(served.url + path, headers=headers) as response:
        assert response.status == 200, await response.text()
        yield Reading(response)


async def ask(served: Served, **fields: Any) -> Any:
    return (await served.post(PATH, {"input": "hi", "temperature": 0} | fields)).body


async def test_whole_and_streamed_are_the_same(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served:
        whole = await ask(served)
        assert whole["output"][0]["content"][0]["text"] == "Hello ďábelské 😀."
        assert (whole["status"], whole["object"], whole["model"]) == ("completed", "response", MODEL)
        async with reading(served) as stream:
            events = await stream.rest()
        kinds = [event["type"] for event in events]
        num_pieces = kinds.count("response.output_text.delta")
        assert kinds == OPENING + ["response.output_text.delta"] * num_pieces + CLOSING + ["response.completed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert stream.text() == "Hello ďábelské 😀."
        last = events[-1]["response"]
        assert last["output"][0]["content"] == whole["output"][0]["content"]
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        assert last["usage"]["total_tokens"] == sum(last["usage"][name] for name in ("input_tokens", "output_tokens"))
        assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}


async def test_length_stop_and_instructions(serve: Serve) -> None:
    async with serve(endless) as served:
        cut = await ask(served, max_output_tokens=5, instructions="Be brief.")
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (cut["usage"]["output_tokens"], cut["instructions"]) == (5, "Be brief.")
        plain = await ask(served, max_output_tokens=5)
        assert plain["usage"]["input_tokens"] < cut["usage"]["input_tokens"]
        stopped = await ask(served, stop=["def"])
        assert (stopped["status"], stopped["output"][0]["content"][0]["text"]) == ("completed", "abc")


async def test_items_and_the_past(serve: Serve) -> None:
    async with serve("Hello.", max_model_len=256, num_pages=300) as served:
        first = await ask(served, input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
        second = await ask(served, input="and", previous_response_id=first["id"])
        spelled = await ask(
            served,
            input=[
                {"type": "message", "role": "user", "content": "hi"},
                first["output"][0],
                {"role": "user", "content": "and"},
            ],
        )
        assert second["previous_response_id"] == first["id"]
        assert second["usage"]["input_tokens"] == spelled["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 3}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input[0].encrypted_content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"), ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"), ({"tool_choice": "must"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
         "tool_choice.name"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"), ({"include": ["x"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"), ({"truncation": "some"}, "truncation"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"), ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strng"}}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": 10**30}}]}, "tools"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"conversation": "c"}, "conversation"), ({"max_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"), ({"logprobs": True}, "logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop[0]"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    async with serve() as served:
        for stream in (True, False):
            refused(await served.post(PATH, {"input": "hi", "stream": stream} | fields), param)


async def test_what_asks_for_nothing_passes(serve: Serve) -> None:
    neutral = {
        "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": None, "include": [],
        "truncation": "disabled", "max_tool_calls": 3, "background": False, "parallel_tool_calls": True, "user": "u",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False}, "metadata": {"a": "b"}, "unknown": 1,
    }  # fmt: skip
    async with serve() as served:
        answer = await ask(served, **neutral)
        assert (answer["status"], answer["metadata"]) == ("completed", {"a": "b"})


WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CALL = '<think>hm</think>So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}


async def test_reasoning_and_calls_are_items_streamed_as_whole(serve: Serve) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        fields = {"tools": [WEATHER], "include": ["reasoning.encrypted_content"]}
        whole = await ask(served, **fields)
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
        thought, said, call = whole["output"]
        assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("hm", "So:")
        assert (call["name"], call["arguments"], call["status"]) == ("get_weather", '{"city": "Brno"}', "completed")
        assert (whole["tools"][0]["name"], whole["tool_choice"]) == ("get_weather", "auto")
        assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
        async with reading(served, **fields) as stream:
            events = await stream.rest()
        last = events[-1]["response"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]
        arguments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
        assert "".join(arguments) == call["arguments"]
        for one in (*whole["output"], *last["output"]):
            del one["id"]
            one.pop("call_id", None)
        assert last["output"] == whole["output"]
        assert last["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}}, "required": ["name"]}


async def test_text_keeps_to_its_format_and_a_call_can_be_demanded(serve: Serve) -> None:
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA | {"additionalProperties": False}}
    async with serve(endless, **LONG) as served:
        answer = await ask(served, text={"format": form})
        assert json.loads(answer["output"][0]["content"][0]["text"])["name"] in ("Ada", "Bob")
        assert (answer["status"], answer["text"]) == ("completed", {"format": form})
        demanded = await ask(served, tools=[WEATHER], tool_choice="required", max_output_tokens=500)
        assert demanded["output"][-1]["type"] == "function_call"
        cut = await ask(served, text={"format": {"type": "json_object"}}, max_output_tokens=9)
        assert cut["output"][0]["content"][0]["text"].startswith("{")


async def test_a_calls_result_goes_on_by_id_or_spelled_out(serve: Serve) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        first = await ask(served, tools=[WEATHER], include=["reasoning.encrypted_content"])
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
        kept = await ask(served, input=[result], previous_response_id=first["id"], tools=[WEATHER])
        opaque = [{**first["output"][0], "content": []}, *first["output"][1:]]
        for output in (first["output"], opaque):
            spelled = await ask(served, input=[{"role": "user", "content": "hi"}, *output, result], tools=[WEATHER])
            assert spelled["usage"]["input_tokens"] == kept["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_what_a_response_answers_is_listed_in_pages(serve: Serve) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        first = await ask(served, tools=[WEATHER])
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
        second = await ask(served, input=[result], previous_response_id=first["id"], tools=[WEATHER])
        where = f"{PATH}/{second['id']}/input_items"
        listed = (await served.get(f"{where}?order=asc"))[1]["data"]
        kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
        assert [item["type"] for item in listed] == kinds and listed[0]["content"][0]["text"] == "hi"
        spelled = await ask(served, input=listed, tools=[WEATHER])
        assert spelled["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        pages, query = [], "?limit=2"
        while True:
            page = (await served.get(where + query))[1]
            pages += page["data"]
            if not page["has_more"]:
                break
            query = f"?limit=2&after={page['last_id']}"
        assert pages == listed[::-1]
        for wrong, param in (("order=x", "order"), ("limit=0", "limit"), ("limit=x", "limit"), ("after=x", "after")):
            status, body = await served.get(f"{where}?{wrong}")
            assert (status, body["error"]["param"]) == (400, param)


async def test_truncation_drops_the_oldest_turns_and_no_result_without_its_call(serve: Serve) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x" * 40}
    talk = [{"role": "user", "content": "y" * 40}, call, result, {"role": "user", "content": "hi"}]
    async with serve(endless, max_model_len=100) as served:
        refused(await served.post(PATH, {"input": talk, "instructions": "Be brief."}), "input")
        short = await ask(served, input=talk, truncation="auto", instructions="Be brief.", max_output_tokens=10)
        assert short["usage"]["input_tokens"] == (await ask(served, instructions="Be brief."))["usage"]["input_tokens"]
        assert (short["truncation"], short["usage"]["output_tokens"]) == ("auto", 10)
        whole = await ask(served, input=talk[-1:], truncation="auto")
        assert whole["usage"]["input_tokens"] == (await ask(served))["usage"]["input_tokens"]
        refused(await served.post(PATH, {"input": "z" * 400, "truncation": "auto"}), "input")


async def test_kept_responses_can_be_asked_for_and_deleted(serve: Serve) -> None:
    async with serve() as served:
        answer = await ask(served)
        where = f"{PATH}/{answer['id']}"
        assert await served.get(where) == (200, answer)
        assert (await served.post(f"{where}/cancel", {})).body == answer  # no news
        async with again(served, f"{where}?stream=true&starting_after=4") as stream:
            events = await stream.rest()
        assert [event["sequence_number"] for event in events] == list(range(5, 5 + len(events)))
        async with served.session.delete(served.url + where) as response:
            assert (await response.json())["deleted"] is True
        status, body = await served.get(where)
        assert (status, body["error"]["code"]) == (404, "response_not_found")
        lost = await served.post(PATH, {"input": "x", "previous_response_id": answer["id"]})
        assert (lost.status, lost.error["code"]) == (400, "previous_response_not_found")


async def test_what_is_not_to_be_stored_is_not(serve: Serve) -> None:
    async with serve() as served:
        answer = await ask(served, store=False)
        assert (await served.get(f"{PATH}/{answer['id']}"))[0] == 404


async def test_retention_ends_by_time_and_by_bytes(serve: Serve) -> None:
    async with serve(settings=Settings(max_retained_bytes=6000)) as served:
        ids = [(await ask(served))["id"] for _ in range(4)]
        assert [(await served.get(f"{PATH}/{one}"))[0] for one in ids] == [404, 404, 200, 200]
    async with serve(settings=Settings(retention_s=0)) as served:
        assert (await served.get(f"{PATH}/{(await ask(served))['id']}"))[0] == 404


async def test_cancel_by_id_ends_the_stream_with_a_terminal_event(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, reading(served) as stream:
        await stream.until("response.output_text.delta")
        where = f"{PATH}/{stream.seen[0]['response']['id']}"
        assert (await served.get(where))[1]["status"] == "in_progress"
        early = await served.post(PATH, {"input": "x", "previous_response_id": stream.seen[0]["response"]["id"]})
        assert early.error["code"] == "previous_response_not_found"
        cancelled = (await served.post(f"{where}/cancel", {})).body
        last = (await stream.rest())[-1]
        assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"] == stream.text()
        await served.idle()


async def test_whoever_leaves_ends_the_response(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served:
        async with reading(served) as stream:
            await stream.until("response.output_text.delta")
        await served.idle()
        asking = asyncio.create_task(ask(served))
        await until(lambda: served.llm.num_live == 1)
        asking.cancel()
        await served.idle()
        assert served.llm.totals.finished["abort"] == 2


@pytest.mark.parametrize("native", [True, False])
async def test_a_client_that_was_cut_off_resumes_without_losing_or_doubling_a_token(serve: Serve, native: bool) -> None:
    async with serve(endless, **ROOMY) as served:
        expected = await ask(served, max_output_tokens=300)
        served.runner.hold(permits=20)
        async with reading(served, max_output_tokens=300, resumable=True) as stream:
            await stream.until("response.output_text.delta")
            response_id, seen = stream.seen[0]["response"]["id"], stream.seen[-1]["sequence_number"]
            texts = [stream.text()]
            stream.response.connection.transport.abort()
        await until(lambda: served.llm.num_live == 1)
        where = f"{PATH}/{response_id}"
        for _ in range(2):  # twice: the second takes over from the first
            path = f"{where}/events" if native else f"{where}?stream=true&starting_after={seen}"
            headers = {"Last-Event-ID": str(seen)} if native else {}
            async with again(served, path, **headers) as stream:
                served.runner.hold(permits=10)
                await stream.until("response.output_text.delta")
                assert stream.seen[0]["sequence_number"] == seen + 1
                seen = stream.seen[-1]["sequence_number"]
                assert not native or stream.raw[-1].id == str(seen)
                texts.append(stream.text())
        path = f"{where}/events" if native else f"{where}?stream=true&starting_after={seen}"
        async with again(served, path, **({"Last-Event-ID": str(seen)} if native else {})) as stream:
            served.runner.let_go()
            last = (await stream.rest())[-1]
            texts.append(stream.text())
        assert "".join(texts) == last["response"]["output"][0]["content"][0]["text"]
        assert last["response"]["output"][0]["content"][0]["text"] == expected["output"][0]["content"][0]["text"]
        assert last["response"]["usage"]["output_tokens"] == 300
        await served.idle()


async def test_nobody_comes_back_within_the_grace(serve: Serve) -> None:
    async with serve(endless, settings=Settings(resume_grace_s=0.01), **ROOMY) as served:
        async with reading(served, resumable=True) as stream:
            await stream.until("response.output_text.delta")
            response_id = stream.seen[0]["response"]["id"]
        await served.idle()
        assert (await served.get(f"{PATH}/{response_id}"))[1]["status"] == "cancelled"


async def test_a_second_follower_takes_over(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, reading(served, max_output_tokens=1000) as first:
        served.runner.hold()
        await first.until("response.created")
        async with again(served, f"{PATH}/{first.seen[0]['response']['id']}?stream=true") as second:
            assert (await first.rest())[-1]["type"] != "response.incomplete"
            served.runner.let_go()
            assert [event["type"] for event in await second.rest()][:4] == OPENING
            assert len(second.text()) == 1000


async def test_a_failing_step_is_told(serve: Serve) -> None:
    async with serve(endless) as served:

        def fail(batch: object) -> None:
            raise RuntimeError("no")

        served.runner.hold(permits=3)
        async with reading(served) as stream:
            await stream.until("response.output_text.delta")
            served.runner.on_result = fail
            served.runner.let_go()
            last = (await stream.rest())[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        answer = await served.post(PATH, {"input": "hi"})
        assert (answer.status, answer.error["code"]) == (500, "step_failed")


async def test_progress_on_request(serve: Serve) -> None:
    async with serve(endless, max_running=1, max_step_tokens=8, **ROOMY) as served:
        served.runner.hold()
        async with reading(served, max_output_tokens=3) as first, reading(served, progress=True) as second:
            await first.until("response.created")
            assert (await second.until("response.progress"))["queue_position"] == 0
            served.runner.let_go()
            await first.rest()
            await second.until("response.output_text.delta")
            told = [event for event in second.seen if event["type"] == "response.progress"]
            assert told[-1]["queue_position"] is None
            assert 0 < told[-1]["computed_tokens"] <= told[-1]["input_tokens"]
            numbers = [event["sequence_number"] for event in second.seen if "sequence_number" in event]
            assert numbers == list(range(len(numbers)))
        await served.idle()


async def test_keep_alive_comments_are_off_unless_asked_for(serve: Serve) -> None:
    for sse_comment_s in (0.0, 0.01):
        async with serve(endless, settings=Settings(sse_comment_s=sse_comment_s)) as served:
            served.runner.hold()
            raw = await served.connect()
            await raw.send(PATH, json.dumps({"input": "hi", "stream": True, "max_output_tokens": 3}).encode())
            if sse_comment_s:
                await raw.reader.readuntil(b"\n: keep-alive\n\n")
            served.runner.let_go()
            data = await raw.reader.readuntil(b"0\r\n\r\n")
            assert sse_comment_s or b"keep-alive" not in data
            raw.leave()


async def test_a_model_without_a_template_says_so(serve: Serve) -> None:
    async with serve(template=None) as served:
        assert (await served.post(PATH, {"input": "hi"})).status == 400
