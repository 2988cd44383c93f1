"""Public bug reports about clients that leave, and ids they share, as tests: see the case ids."""

import asyncio
import json
import logging
import socket

import openai
import pytest

from asyncllm.server.settings import Settings

from .conftest import BOTH, CHAT, HI, MODEL, TEXT, Serve, Served, endless, until

LONG = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16, "max_running": 20, "max_waiting": 64}


def ghost(stream: bool) -> bytes:
    body = {"messages": HI, "prompt": "hi", "stream": stream, "max_tokens": 2000, "ignore_eos": True}
    return json.dumps(body).encode()


# -- ABORT-1, ABORT-2 --


async def test_abort_1_streams_closed_early_leave_nothing(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(endless, **LONG) as served:
        await served.alive()
        await served.idle()

        async def visit(i: int) -> None:
            raw = await served.connect()
            await raw.send(CHAT, ghost(stream=True))
            await raw.events(1 + i % 3)
            raw.leave(reset=i % 2 == 0)

        for group in range(15):
            async with asyncio.TaskGroup() as tasks:
                for i in range(20):
                    tasks.create_task(visit(group + i))
        await served.idle()
        metrics = await served.metrics()
        assert metrics["asyncllm_requests_running"] == metrics["asyncllm_requests_waiting"] == 0
        assert metrics["asyncllm_kv_pages_used"] == 0
        assert metrics['asyncllm_requests_finished_total{reason="abort"}'] == 300
        await served.alive()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@BOTH
@pytest.mark.parametrize("reset", [False, True])
async def test_abort_2_whoever_leaves_is_noticed_running_or_queued(serve: Serve, stream: bool, reset: bool) -> None:
    config = LONG | {"max_running": 4, "max_waiting": 64}
    async with serve(endless, **config) as served:
        served.runner.hold()  # so nobody is answered: some sequences hold a slot, the others wait
        visitors = [await served.connect() for _ in range(20)]
        for visitor in visitors:
            await visitor.send(TEXT, ghost(stream))
        await until(lambda: served.llm.num_live == 20)
        for visitor in visitors:
            visitor.leave(reset=reset)
        await until(lambda: served.llm.num_live == 0)
        served.runner.let_go()
        await served.idle()
        # Two steps at most were in flight when they left.
        assert max([batch.step for batch in served.runner.batches], default=0) <= 3
        await served.alive()


async def test_abort_2_answered_requests_leave_nothing(serve: Serve) -> None:
    async with serve("Hi.") as served:
        for _ in range(25):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(served.complete())
        await served.idle()
        assert (await served.metrics())['asyncllm_requests_finished_total{reason="stop"}'] == 200


async def test_leaving_while_the_prompt_is_tokenised(serve: Serve) -> None:
    async with serve(endless, max_model_len=8192, num_pages=1000, page_size=16) as served:
        for _ in range(10):
            raw = await served.connect()
            await raw.send(TEXT, json.dumps({"prompt": "0a" * 3000, "max_tokens": 5000}).encode())
            raw.leave(reset=True)
        await served.alive()
        await served.idle()


async def test_a_neighbour_is_not_disturbed_by_leavers(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        alone = await served.complete("neighbour", max_tokens=400)
        staying = asyncio.create_task(served.complete("neighbour", max_tokens=400, stream=True))
        for i in range(20):
            raw = await served.connect()
            await raw.send(TEXT, ghost(stream=True))
            await raw.events(1)
            raw.leave(reset=bool(i % 2))
        assert (await staying).text() == alone.text()
        await served.idle()


async def test_a_reader_that_does_not_read_is_cut_off_and_holds_nobody_up(serve: Serve) -> None:
    """Continuous usage makes the events large, so that the buffers fill within one answer."""
    settings = Settings(send_timeout_s=0.05)
    async with serve(endless, settings=settings, **(LONG | {"max_model_len": 30_000, "num_pages": 6000})) as served:
        host, port = served.url.removeprefix("http://").split(":")
        stuck = socket.create_connection((host, int(port)))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        options = {"continuous_usage_stats": True}
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 29_000, "stream_options": options}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        stuck.sendall(head.encode() + body)
        await until(lambda: served.llm.num_live == 1)
        assert (await served.complete("y", stream=True)).status == 200
        await until(lambda: served.llm.totals.finished["abort"] == 1)
        await served.idle()
        stuck.close()


# -- ID-1 --


async def ask_with_id(served: Served, request_id: str, number: int, stream: bool) -> None:
    headers = {"X-Request-Id": request_id} if request_id.isprintable() else {}
    answer = await served.post(
        TEXT,
        {"prompt": [10 + number, 20], "max_tokens": 4, "stream": stream, "request_id": request_id},
        headers=headers,
    )
    assert answer.text() == served.tokenizer.decode([70 + number] * 4)


def echo(context: list[int], prompt_len: int) -> int:
    """A model that answers with the first token of its prompt, moved to the letters."""
    return context[0] + 60


@BOTH
async def test_id_1_requests_that_share_an_id_do_not_mix(serve: Serve, stream: bool) -> None:
    async with serve(echo) as served:
        for num_parallel in (2, 20):
            async with asyncio.TaskGroup() as tasks:
                for i in range(num_parallel):
                    tasks.create_task(ask_with_id(served, "same", i, stream))
        for i in range(100):
            await ask_with_id(served, "again", i % 20, stream)
        await served.idle()


@BOTH
async def test_id_1_an_id_is_echoed_when_sane_and_replaced_when_not(serve: Serve, stream: bool) -> None:
    async with serve() as served:
        for theirs in ("abc-123", "x" * 128):
            answer = await served.chat(stream=stream)
            ours = answer.headers["X-Request-Id"]
            assert ours.startswith("req_")
            answer = await served.post(CHAT, {"messages": HI, "stream": stream}, headers={"X-Request-Id": theirs})
            assert answer.headers["X-Request-Id"] == theirs
        for theirs in ("", "x" * 129, "emoji 😀", "tab\tbed"):
            answer = await served.post(CHAT, {"messages": HI, "stream": stream}, headers={"X-Request-Id": theirs})
            assert answer.status == 200
            assert answer.headers["X-Request-Id"].startswith("req_")
        ids = [(await served.chat()).body["id"] for _ in range(10)]
        assert len(set(ids)) == 10


async def test_id_1_errors_carry_an_id_too_and_huge_ones_are_refused(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.post("/nowhere", {}, headers={"X-Request-Id": "me"})
        assert (answer.status, answer.headers["X-Request-Id"]) == (404, "me")
        raw = await served.connect()
        await raw.send(TEXT, b"{}", f"X-Request-Id: {'x' * 10_000}\r\n")
        assert await raw.status() == 431
        raw.leave()
        raw = await served.connect()
        await raw.send(TEXT, b"{}", "X-Request-Id: a\r\n b: c\r\n")
        assert b"\nb: c" not in await raw.reader.readuntil(b"\r\n\r\n")
        raw.leave()
        await served.alive()


# -- the openai package --


async def test_the_openai_client_streams_a_chat(serve: Serve) -> None:
    async with (
        serve("Hello ďábelské 😀.") as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-") as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, temperature=0
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello ďábelské 😀."
        assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
        assert chunks[-1].usage is not None
        whole = await client.chat.completions.create(model=MODEL, messages=HI)
        assert whole.choices[0].message.content == "Hello ďábelské 😀."
        assert whole._request_id is not None
        assert whole._request_id.startswith("req_")


async def test_the_openai_clients_stream_helper(serve: Serve) -> None:
    async with serve("Hello there.") as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-") as client:
        async with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "Hello there."
        assert final.choices[0].finish_reason == "stop"


async def test_the_openai_client_completes_and_lists_models(serve: Serve) -> None:
    async with serve("dog") as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-") as client:
        text = await client.completions.create(model=MODEL, prompt=["a", "b"])
        assert [choice.text for choice in text.choices] == ["dog", "dog"]
        pieces = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(model=MODEL, prompt="a", stream=True)
        ]
        assert "".join(pieces) == "dog"
        [model] = [model async for model in client.models.list()]
        assert model.id == MODEL
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")


async def test_the_openai_client_reads_our_errors(serve: Serve) -> None:
    async with serve() as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=HI, n=129)
        assert caught.value.param == "n"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=HI)
        assert missing.value.code == "model_not_found"


async def test_the_openai_client_sees_a_failure_in_the_middle(serve: Serve) -> None:
    async with serve(endless) as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-") as client:

        def fail(batch: object) -> None:
            raise RuntimeError("no")

        served.runner.hold(permits=3)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        await anext(stream)
        served.runner.on_result = fail
        served.runner.let_go()
        with pytest.raises(openai.APIError, match="can be sent again"):
            async for _ in stream:
                pass


async def test_the_openai_client_leaves_and_the_request_is_aborted(serve: Serve) -> None:
    async with serve(endless, **LONG) as served, openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, max_tokens=2000)
        await anext(stream)
        await stream.close()
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1
