"""Public bug reports about text, stops and the shape of answers, as tests: see the case ids."""

import asyncio
import json

import pytest

from asyncllm.errors import EngineDead
from asyncllm.wire.sse import Decoder

from .conftest import BOTH, CHAT, HI, TEXT, Serve, endless, until

MIXED = " 😀🏳️‍🌈👩‍👩‍👧 ďábelské 삼겹살 ภาษาไทย"


# -- UTF-1, UTF-3 --


async def test_utf_1_joined_deltas_equal_the_whole_answer(serve: Serve) -> None:
    async with serve(MIXED, max_model_len=256, num_pages=200) as served:
        whole = await served.complete("repeat", max_tokens=200)
        streamed = await served.complete("repeat", max_tokens=200, stream=True)
        assert whole.text() == streamed.text() == MIXED
        assert not any("\ufffd" in piece for piece in streamed.texts())
        assert (whole.finish_reason, streamed.finish_reason) == ("stop", "stop")


async def test_utf_1_endless_broken_characters_are_flushed(serve: Serve) -> None:
    async with serve("") as served:
        first = served.tokenizer.encode("😀")[0]
        served.runner.next_token = lambda context, prompt_len: first
        answers = [await served.complete(max_tokens=20, stream=stream) for stream in (False, True)]
        assert answers[0].text() == answers[1].text() == "\ufffd" * 20
        assert {answer.finish_reason for answer in answers} == {"length"}


@BOTH
async def test_utf_3_a_limit_inside_a_character(serve: Serve, stream: bool) -> None:
    async with serve("ab😀") as served:
        ids = served.tokenizer.encode("ab😀")
        before = len(served.tokenizer.encode("ab"))
        for max_tokens in range(before + 1, len(ids)):
            answer = await served.complete(max_tokens=max_tokens, stream=stream)
            assert (answer.text(), answer.finish_reason) == ("ab\ufffd", "length")
            assert answer.usage["completion_tokens"] == max_tokens
        answer = await served.complete(max_tokens=len(ids), stream=stream)
        assert answer.text() == "ab😀"


# -- STOP-1, STOP-2, STOP-4 --

FOX = "The quick brown fox jumps over the lazy dog. Hello, how are you today?"


@BOTH
async def test_stop_1_a_stop_that_begins_or_ends_inside_a_token(serve: Serve, stream: bool) -> None:
    async with serve(FOX, max_model_len=256, num_pages=200) as served:
        pieces = [served.tokenizer.decode([token_id]) for token_id in served.tokenizer.encode(FOX)]
        for before, piece in zip(pieces, pieces[1:], strict=False):
            for stop in (before[-2:] + piece[:2], piece[1:3], piece[-1:]):
                if not stop:
                    continue
                answer = await served.complete(stop=stop, stream=stream)
                assert (answer.text(), answer.finish_reason) == (FOX[: FOX.index(stop)], "stop")
        answer = await served.complete(stop=["zebra", "fox!", "jump", "dogs"], stream=stream)
        assert answer.text() == "The quick brown fox "


async def test_stop_1_the_first_in_the_text_wins_not_the_first_in_the_list(serve: Serve) -> None:
    async with serve(FOX) as served:
        assert (await served.complete(stop=["lazy", "brown", "dog"])).text() == "The quick "


async def test_stop_2_no_beginning_of_a_stop_slips_out(serve: Serve) -> None:
    async with serve(FOX, max_model_len=256, num_pages=400, max_running=16) as served:
        ids = served.tokenizer.encode(FOX)
        spanning = served.tokenizer.decode(ids[10:15])
        earlier = served.tokenizer.decode(ids[8:10])
        near_miss = served.tokenizer.decode(ids[10:13]) + "#"
        expected = {spanning: FOX[: FOX.index(spanning)], near_miss: FOX}

        async def one(stop: str) -> None:
            streamed = await served.complete(stop=stop, stream=True)
            assert streamed.text() == expected[stop]

        for _ in range(5):
            async with asyncio.TaskGroup() as group:
                for i in range(16):
                    group.create_task(one(near_miss if i % 2 else spanning))
        both = [await served.complete(stop=[spanning, earlier], stream=stream) for stream in (False, True)]
        assert both[0].text() == both[1].text() == FOX[: FOX.index(earlier)]
        await served.idle()


async def test_a_token_goes_out_before_the_next_is_made(serve: Serve) -> None:
    async with serve(endless) as served:
        served.runner.hold()
        raw = await served.connect()
        await raw.send(TEXT, json.dumps({"prompt": "x", "stream": True, "max_tokens": 9}).encode())
        for letter in "abcdefghi":
            served.runner.hold(permits=1)
            await raw.events(1)
            assert f'"text":"{letter}"'.encode() in await raw.reader.readuntil(b"\n\n")
        raw.leave()
        await served.idle()


async def test_stop_2_what_cannot_become_a_stop_is_not_held_back(serve: Serve) -> None:
    async with serve(endless) as served:
        served.runner.hold(permits=3)
        raw = await served.connect()
        await raw.send(TEXT, json.dumps({"prompt": "x", "stop": ["abcX"], "stream": True, "max_tokens": 9}).encode())
        await until(lambda: served.runner.batches and not served.runner.may_finish())
        assert served.llm.num_live == 1
        served.runner.hold(permits=1)
        await raw.events(1)  # "abcd" at once, with the letter that rules the stop out, while the engine stands still
        assert b'"text":"abcd"' in await raw.reader.readuntil(b"\n\n")
        raw.leave()
        served.runner.let_go()
        await served.idle()


@BOTH
async def test_stop_4_a_stop_on_the_very_first_token(serve: Serve, stream: bool) -> None:
    async with serve(FOX) as served:
        first = served.tokenizer.decode(served.tokenizer.encode(FOX)[:1])
        for ask in (served.complete, served.chat):
            answer = await ask(stop=[first], stream=stream)
            assert (answer.text(), answer.finish_reason) == ("", "stop")
            assert answer.usage["completion_tokens"] == 1
            assert "" in answer.texts()  # the choice is there, its text not null


@BOTH
async def test_stop_4_hidden_tokens_remove_no_letters(serve: Serve, tokenizer: object, stream: bool) -> None:
    async with serve("dog") as served:
        ids = served.tokenizer.encode("dog")
        natural = await served.complete(stream=stream)
        by_id = await served.complete(stop_token_ids=[ids[-1]], stream=stream)
        assert (natural.text(), natural.finish_reason) == ("dog", "stop")
        assert by_id.text() == served.tokenizer.decode(ids[:-1])
        assert by_id.finish_reason == "stop"


@BOTH
async def test_stop_4_empty_stops(serve: Serve, stream: bool) -> None:
    async with serve("dog") as served:
        for nothing in (None, []):
            assert (await served.complete(stop=nothing, stream=stream)).text() == "dog"
        for bad, param in (("", "stop[0]"), ([""], "stop[0]"), (["a", ""], "stop[1]"), (["a"] * 100, "stop")):
            answer = await served.complete(stop=bad, stream=stream)
            assert (answer.status, answer.error["param"]) == (400, param)


# -- SSE-1, SSE-3 --


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_sse_1_usage_only_when_asked_once_and_right(serve: Serve, path: str) -> None:
    async with serve("Hello there.") as served:
        body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        whole = await served.post(path, body | {"stream_options": {"include_usage": True}})
        assert whole.status == 200  # (e) stream_options without stream are ignored
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            answer = await served.post(path, body | {"stream": True} | options)
            assert all(event["choices"] and event.get("usage") is None for event in answer.events)
            assert answer.is_done
        answer = await served.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
        *others, last = answer.events
        assert all(event["choices"] and event.get("usage") is None for event in others)
        assert others[-1]["choices"][0]["finish_reason"] == "stop"
        assert (last["choices"], answer.is_done) == ([], True)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][count] == whole.usage[count]
        assert whole.usage["total_tokens"] == whole.usage["prompt_tokens"] + whole.usage["completion_tokens"]
        assert {event["id"] for event in answer.events} == {last["id"]}


async def test_sse_1_usage_of_several_prompts_is_their_sum(serve: Serve) -> None:
    async with serve("Hello there.") as served:
        whole = await served.complete(["hi", "hello you"])
        streamed = await served.complete(["hi", "hello you"], stream=True)
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert streamed.usage[count] == whole.usage[count]
        assert [streamed.text(i) for i in (0, 1)] == ["Hello there."] * 2


async def test_sse_usage_in_every_chunk_when_asked(serve: Serve) -> None:
    async with serve("Hello there.") as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await served.chat(stream=True, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in answer.events]
        assert counts == sorted(counts)
        assert len({event["usage"]["prompt_tokens"] for event in answer.events}) == 1


async def test_sse_headers(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.chat(stream=True)
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in answer.headers


@pytest.mark.parametrize("fields", [{"n": 0}, {"max_tokens": -1}, {"suffix": "x"}])
async def test_sse_3_a_refusal_is_plain_json_before_any_event(serve: Serve, fields: dict[str, object]) -> None:
    async with serve() as served:
        too_long = {"messages": [{"role": "user", "content": "x" * 10_000}]}
        for body in ({"messages": HI} | fields, too_long):
            answer = await served.post(CHAT, body | {"stream": True})
            assert answer.status == 400
            assert answer.headers["Content-Type"].startswith("application/json")
            assert answer.error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fatal", [False, True])
async def test_sse_3_a_failure_in_the_middle_is_told_and_the_connection_closed(
    serve: Serve, path: str, fatal: bool
) -> None:
    async with serve(endless) as served:

        def fail(batch: object) -> None:
            raise EngineDead("gone") if fatal else RuntimeError("/secret/path")

        body = {"messages": HI, "prompt": "x", "stream": True, "max_tokens": 50}
        served.runner.hold(permits=3)
        raw = await served.connect()
        await raw.send(path, json.dumps(body).encode())
        await raw.events(1)
        served.runner.on_result = fail
        served.runner.let_go()
        rest = await raw.rest()  # returns, so the socket was closed
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert b"secret" not in rest
        events = [event.data for event in Decoder().feed(b"".join(rest.split(b"\r\n")[1::2]))]
        error = json.loads(rest[rest.rindex(b"data: ") + 6 :].split(b"\n\n")[0])["error"]
        assert error["code"] == ("engine_dead" if fatal else "step_failed"), events
        if not fatal:
            served.runner.on_result = lambda batch: None
            await served.alive()
        raw.leave()


@BOTH
async def test_sse_3_a_failure_before_the_first_token_has_its_status(serve: Serve, stream: bool) -> None:
    async with serve(endless) as served:

        def fail(batch: object) -> None:
            raise RuntimeError("no")

        served.runner.on_result = fail
        answer = await served.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (500, "step_failed")


async def test_sse_3_an_abort_from_elsewhere_is_told(serve: Serve) -> None:
    async with serve(endless) as served:
        served.runner.hold(permits=2)
        raw = await served.connect()
        await raw.send(CHAT, json.dumps({"messages": HI, "stream": True}).encode())
        await raw.events(1)
        for request_id in list(served.llm._registry.mailboxes):
            served.llm.abort(request_id)
        rest = await raw.rest()
        assert b'"code":"aborted"' in rest
        assert b"[DONE]" not in rest
        raw.leave()
        served.runner.let_go()


# -- FIN-1 --


@BOTH
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fin_1_the_limit_is_length_and_the_end_is_stop(serve: Serve, stream: bool, path: str) -> None:
    async with serve("dog fox") as served:
        ids = served.tokenizer.encode("dog fox")
        end = len(ids) + 1  # EOS counts

        async def ask(**fields: object) -> tuple[str, str, int]:
            answer = await (served.chat if path == CHAT else served.complete)(stream=stream, **fields)
            return answer.text(), answer.finish_reason, answer.usage["completion_tokens"]

        assert await ask(max_tokens=1) == (served.tokenizer.decode(ids[:1]), "length", 1)
        assert await ask(max_tokens=end - 1) == ("dog fox", "length", end - 1)
        assert await ask(max_tokens=end) == ("dog fox", "stop", end)
        assert await ask(max_tokens=end + 1) == ("dog fox", "stop", end)
        assert await ask(max_tokens=end - 1, stop="x") == ("dog fo", "stop", end - 1)
