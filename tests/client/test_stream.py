"""Streams: what comes over the wire and what the reader gets, where it ends, and what leaving it does."""

import asyncio
import gc

import pytest

from asyncllm.client import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    AsyncClient,
    ReplyTooLargeError,
    Stream,
    StreamTruncatedError,
    Timeout,
)
from asyncllm.client.replies import ChatCompletionChunk

from .fake import (
    DONE,
    MESSAGES,
    SSE_HEAD,
    Act,
    Exchange,
    chat_event,
    chat_stream,
    event,
    raw_server,
    stream,
    usage_event,
)


async def chat(client: AsyncClient, **fields: object) -> Stream[ChatCompletionChunk]:
    return await client.chat.completions.create(messages=MESSAGES, stream=True, **fields)


async def read(act: Act, **options: object) -> tuple[list[str], BaseException | None]:
    """The texts of one stream, and the error that ended it."""
    texts: list[str] = []
    async with raw_server(act) as server, AsyncClient(server.url, **options) as client:  # type: ignore[arg-type]
        try:
            async for chunk in await chat(client):
                texts += [choice.delta.content or "" for choice in chunk.choices]
        except APIError as error:
            return texts, error
    return texts, None


# -- CLI-1: SSE records without data, comments, or empty choices --

ODD_RECORDS = {
    "comment": b": ping\n\n",
    "retry": b"retry: 1000\n\n",
    "id": b"id: 7\n\n",
    "empty data": b"data:\n\n",
    "unknown field": b"flavour: sweet\n\n",
    "event without data": b"event: ping\n\n",
    "byte-order mark": b"\xef\xbb\xbf: x\n\n",
}


@pytest.mark.parametrize("record", ODD_RECORDS.values(), ids=ODD_RECORDS)
async def test_cli_1_odd_records_are_skipped(record: bytes) -> None:
    act = stream(record, chat_event("a"), record + chat_event("b"), chat_event(finish="stop") + record + DONE)
    assert await read(act) == (["a", "b", ""], None)


async def test_cli_1_data_without_a_space_over_lines_and_with_cr() -> None:
    spread = chat_event("b").replace(b',"choices"', b',\ndata: "choices"')
    cr = chat_event("c").replace(b"\n", b"\r\n")
    assert await read(stream(b"data:" + chat_event("a")[6:], spread, cr, chat_event(finish="stop") + DONE)) == (
        ["a", "b", "c", ""],
        None,
    )


async def test_cli_1_empty_choices_are_handed_on() -> None:
    chunks = []
    async with raw_server(chat_stream("a")) as server, AsyncClient(server.url) as client:
        async for chunk in await chat(client):
            chunks.append(chunk)  # noqa: PERF401
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
    assert chunks[0].usage is None
    assert chunks[2].usage is not None
    assert chunks[2].usage.completion_tokens == 1


@pytest.mark.parametrize(
    "body",
    [
        b'event: error\ndata: {"message": "broke", "type": "server_error", "code": "x"}\n\n',
        b'event: error\ndata: {"error": {"message": "broke", "type": "server_error", "code": "x"}}\n\n',
        event({"error": {"message": "broke", "type": "server_error", "code": "x", "param": None}}),
        event({"object": "error", "message": "broke", "type": "server_error", "code": "x"}),
    ],
)
async def test_cli_1_an_error_event_raises_the_api_error(body: bytes) -> None:
    # The server breaks off behind it, as ours does: the event must not be lost behind the disconnect.
    texts, error = await read(stream(chat_event("a"), body, end=b""))
    assert texts == ["a"]
    assert type(error) is APIError
    assert (str(error), error.type, error.code) == ("broke", "server_error", "x")


async def test_cli_1_an_end_before_the_answers_end_is_told() -> None:
    for end in (b"0\r\n\r\n", b""):
        texts, error = await read(stream(chat_event("a"), chat_event("b"), end=end))
        assert texts == ["a", "b"]
        assert type(error) is StreamTruncatedError
        assert error.request_id is not None


async def test_an_end_without_done_is_fine_once_every_choice_has_finished() -> None:
    assert await read(stream(chat_event("a"), chat_event(finish="stop"))) == (["a", ""], None)
    two = (chat_event("a"), chat_event("b", index=1), chat_event(finish="stop"))
    assert (await read(stream(*two)))[1].__class__ is StreamTruncatedError
    assert await read(stream(*two, chat_event(finish="stop", index=1))) == (["a", "b", "", ""], None)


async def test_cli_1_after_done_the_connection_goes_back_to_the_pool() -> None:
    acts = [stream(chat_event("a"), chat_event(finish="stop") + DONE, b"data: rubbish\n\n"), chat_stream("b")]
    async with raw_server(*acts) as server, AsyncClient(server.url) as client:
        for _ in acts:
            assert len([chunk async for chunk in await chat(client)]) >= 2
        assert server.num_connections == 1


async def test_a_body_that_never_ends_behind_done_is_closed() -> None:
    async def act(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event(finish="stop") + DONE)
        await exchange.left()

    async with raw_server(act) as server, AsyncClient(server.url) as client:
        assert len([chunk async for chunk in await chat(client)]) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_events_and_characters_may_be_cut_anywhere(size: int) -> None:
    data = chat_event("naïve 😀") + b": x\r\n\r\n" + chat_event(finish="stop") + DONE
    act = stream(*[data[i : i + size] for i in range(0, len(data), size)])
    assert await read(act) == (["naïve 😀", ""], None)


async def test_what_servers_leave_out_or_send_as_null_has_a_default() -> None:
    chunks = [{}, {"choices": None}, {"choices": [{"delta": None}]}, {"choices": [{"index": None}], "id": None}]
    async with raw_server(stream(*map(event, chunks), DONE)) as server, AsyncClient(server.url) as client:
        read = [chunk async for chunk in await chat(client)]
    assert [len(chunk.choices) for chunk in read] == [0, 0, 1, 1]
    assert read[2].choices[0].delta.content is None
    assert read[1].to_dict() == {"choices": None}


async def test_rubbish_in_a_stream_is_told_as_such() -> None:
    _, error = await read(stream(b"data: {not json\n\n"))
    assert type(error) is APIResponseValidationError


# -- CLI-3: large events --


@pytest.mark.parametrize("num_bytes", [100_000, 130_000, 600_000, 5_000_000])
async def test_cli_3_a_long_line_arrives_whole(num_bytes: int) -> None:
    text = "x" * num_bytes
    assert await read(stream(chat_event(text), chat_event(finish="stop") + DONE)) == ([text, ""], None)


async def test_cli_3_the_bound_on_an_event_is_told_and_closes_the_connection() -> None:
    left = asyncio.Event()

    async def act(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event("a"))
        await exchange.chunk(b"data: " + b"x" * 2000)
        await exchange.left()
        left.set()

    async with raw_server(act) as server, AsyncClient(server.url, max_event_bytes=1000) as client:
        with pytest.raises(ReplyTooLargeError):
            async for _ in await chat(client):
                pass
        await left.wait()


async def test_cli_3_what_came_before_a_too_large_event_is_read_first() -> None:
    act = stream(chat_event("a") + chat_event("b") + b"data: " + b"x" * 2000)
    texts, error = await read(act, max_event_bytes=1000)
    assert (texts, type(error)) == (["a", "b"], ReplyTooLargeError)


# -- leaving --


def endless(left: asyncio.Event) -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event("a"))
        await exchange.left()
        left.set()

    return act


async def test_leaving_closes_the_connection_so_that_the_server_stops() -> None:
    left = asyncio.Event()
    async with raw_server(endless(left)) as server, AsyncClient(server.url) as client:
        async with await chat(client) as running:
            assert (await anext(running)).choices[0].delta.content == "a"
        await left.wait()
        with pytest.raises(StopAsyncIteration):
            await anext(running)
        await running.aclose()


async def test_a_stream_that_is_let_go_is_closed() -> None:
    left = asyncio.Event()
    async with raw_server(endless(left)) as server, AsyncClient(server.url) as client:
        async for _ in await chat(client):
            break
        gc.collect()
        await left.wait()


async def test_cancelling_the_reader_closes_the_connection() -> None:
    left = asyncio.Event()
    async with raw_server(endless(left)) as server, AsyncClient(server.url) as client:
        running = await chat(client)
        await anext(running)
        reading = asyncio.ensure_future(anext(running))
        await asyncio.wait([reading], timeout=0)
        reading.cancel()
        await left.wait()
        assert reading.cancelled()


async def test_cancelling_before_the_answer_begins_closes_the_connection() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def act(exchange: Exchange) -> None:
        asked.set()
        await exchange.left()
        left.set()

    async with raw_server(act) as server, AsyncClient(server.url) as client:
        task = asyncio.ensure_future(chat(client))
        await asked.wait()
        task.cancel()
        await left.wait()


async def test_a_reader_that_does_not_pull_stops_the_server() -> None:
    """What is read ahead is what the sockets and one small buffer hold, not the answer."""
    sent = 0
    stalled = asyncio.Event()

    async def act(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(SSE_HEAD)
        while not stalled.is_set():
            try:
                async with asyncio.timeout(0.5):
                    await exchange.chunk(chat_event("x" * 50_000))
            except TimeoutError:
                stalled.set()
            sent += 50_000

    async with raw_server(act) as server, AsyncClient(server.url) as client:
        async with await chat(client) as running:
            await anext(running)
            await stalled.wait()
    assert sent < 30_000_000


async def test_silence_is_bounded_and_a_break_is_told() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event("a"))
        await exchange.left()

    texts, error = await read(silent, timeout=Timeout(read=0.1))
    assert (texts, type(error)) == (["a"], APITimeoutError)
    texts, error = await read(silent, timeout=Timeout(total=0.2))
    assert (texts, type(error)) == (["a"], APITimeoutError)

    async def broken(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event("a"))
        exchange.reset()

    _, error = await read(broken)
    assert isinstance(error, StreamTruncatedError)
    assert isinstance(error.__cause__, APIConnectionError)


async def test_an_answer_that_is_no_stream() -> None:
    async def html(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p/>")

    async def hidden_error(exchange: Exchange) -> None:
        body = b'{"error": {"message": "no such model"}}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        await exchange.send(head + body)

    assert type((await read(html))[1]) is APIResponseValidationError
    assert str((await read(hidden_error))[1]) == "no such model"


# -- adding up --


async def test_stream_helper_gives_text_snapshot_and_the_whole() -> None:
    async with raw_server(chat_stream("Hel", "lo", "!")) as server, AsyncClient(server.url) as client:
        async with client.chat.completions.stream(messages=MESSAGES) as running:
            texts = running.text_stream
            assert await anext(texts) == "Hel"
            assert running.snapshot.choices[0].message.content == "Hel"
            assert [text async for text in texts] == ["lo", "!"]
            whole = await running.get_final_completion()
            assert (await running.get_final_text(), running.request_id) == ("Hello!", whole.id and running.request_id)
        choice = whole.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
        assert whole.usage is not None
        assert whole.usage.total_tokens == 6
        assert server.requests[0].json() == {"messages": MESSAGES, "stream": True}


async def test_stream_helper_adds_up_tool_calls_and_tells_events() -> None:
    def call(index: int, **more: object) -> bytes:
        return event({"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [{"index": index} | more]}}]})

    act = stream(
        call(0, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x"'}),
        call(1, id="b", type="function", function={"name": "g", "arguments": "{}"}),
        call(0, id="a", function={"name": "f", "arguments": ":1}"}),  # repeated, as some do
        chat_event(finish="tool_calls") + DONE,
    )
    async with raw_server(act) as server, AsyncClient(server.url) as client:
        async with client.chat.completions.stream(messages=MESSAGES) as running:
            events = [event async for event in running if event.type != "chunk"]
            message = await running.get_final_message()
    assert [event.type.rpartition(".")[2] for event in events] == ["delta"] * 4 + ["done"] * 2
    assert [(event.name, event.arguments) for event in events[4:]] == [("f", '{"x":1}'), ("g", "{}")]
    assert message.tool_calls is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]


async def test_completions_stream_helper() -> None:
    def text(index: int, text: str, finish: str | None = None) -> bytes:
        return event({"id": "t", "choices": [{"index": index, "text": text, "finish_reason": finish}]})

    act = stream(text(0, "a"), text(1, "x"), text(0, "b", "stop"), text(1, "y", "length"), usage_event(1, 2) + DONE)
    async with raw_server(act) as server, AsyncClient(server.url) as client:
        async with client.completions.stream(prompt=["p", "q"]) as running:
            assert await running.get_final_text() == "ab"
            assert [(choice.text, choice.finish_reason) for choice in running.snapshot.choices] == [
                ("ab", "stop"),
                ("xy", "length"),
            ]


def response_events(*texts: str) -> list[dict[str, object]]:
    base = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "".join(texts), "annotations": []}
    usage = {"input_tokens": 3, "output_tokens": len(texts), "total_tokens": 3 + len(texts)}
    done = base | {"status": "completed", "output": [item | {"content": [part]}], "usage": usage}
    events: list[dict[str, object]] = [
        {"type": "response.created", "response": base | {"status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", "item_id": "msg_1", "part": part | {"text": ""}},
        *({"type": "response.output_text.delta", "item_id": "msg_1", "delta": text} for text in texts),
        {"type": "response.completed", "response": done},
    ]
    return [event | {"sequence_number": i} for i, event in enumerate(events)]


async def test_responses_over_sse() -> None:
    events = [f"event: {e['type']}\n".encode() + event(e) for e in response_events("Hel", "lo")]
    async with raw_server(stream(*events)) as server, AsyncClient(server.url) as client:
        async with client.responses.stream(model="m", input="Hi") as running:
            texts = running.text_stream
            assert await anext(texts) == "Hel"
            assert running.snapshot.output_text == "Hel"
            response = await running.get_final_response()
        assert (response.status, response.output_text, response.id) == ("completed", "Hello", "resp_1")
        raw = [e async for e in await client.responses.create(input="Hi", stream=True)]
        assert [e.sequence_number for e in raw] == list(range(6))
        assert server.num_connections == 1
        assert server.requests[0].json() == {"model": "m", "input": "Hi", "stream": True}


async def test_responses_without_their_end_are_truncated() -> None:
    events = [event(e) for e in response_events("a")[:-1]]
    async with raw_server(stream(*events)) as server, AsyncClient(server.url) as client:
        with pytest.raises(StreamTruncatedError):
            async with client.responses.stream(input="Hi") as running:
                await running.until_done()
