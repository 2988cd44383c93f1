"""AsyncClient: requests and whole replies, errors by status, retries and their deadline, loops and sessions."""

import asyncio
import email.utils
import pickle
import random
import socket
import time
from contextlib import closing

import aiohttp
import pytest

from asyncllm.client import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ReplyTooLargeError,
    Retries,
    StreamTruncatedError,
    Timeout,
    UnprocessableEntityError,
)
from asyncllm.client.errors import status_error
from asyncllm.client.http import make_call, read_whole
from asyncllm.client.replies import ChatCompletion, Message
from asyncllm.client.retries import retry_after_s

from .fake import (
    DONE,
    HEAD,
    MESSAGES,
    SSE_HEAD,
    WHOLE,
    Act,
    Exchange,
    chat_event,
    chat_stream,
    json_reply,
    raw_server,
    refusal,
    stream,
)

SOON = Retries(max_retries=2, first_delay_s=0.001)


async def ask(client: AsyncClient, **fields: object) -> ChatCompletion:
    return await client.chat.completions.create(messages=MESSAGES, **fields)


# -- requests and replies --


async def test_a_whole_chat_completion() -> None:
    async with raw_server(json_reply(WHOLE, headers="X-Request-Id: theirs\r\n")) as server:
        async with AsyncClient(server.url, "secret", default_headers={"X-Team": "a"}) as client:
            reply = await ask(client, model="m", temperature=0.5, extra_body={"top_k": 3}, extra_headers={"X-One": "1"})
    request = server.requests[0]
    assert reply.choices[0].message.content == "Hi"
    assert reply._request_id == "theirs"
    assert reply.to_dict() == WHOLE
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.json() == {"messages": MESSAGES, "model": "m", "temperature": 0.5, "top_k": 3}
    assert request.headers["authorization"] == "Bearer secret"
    assert (request.headers["x-team"], request.headers["x-one"]) == ("a", "1")


async def test_every_other_call() -> None:
    model = {"id": "org/m", "object": "model", "created": 1, "owned_by": "o", "max_model_len": 512}
    response = {"id": "resp_1", "status": "cancelled", "output": []}
    acts = [
        json_reply({"object": "list", "data": [model]}),
        json_reply(model),
        json_reply({"tokens": [1, 2], "count": 2, "max_model_len": 512}),
        json_reply({"prompt": "Hi"}),
        json_reply({"id": "t", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}),
        json_reply(response),
        json_reply(response),
        json_reply(response),
    ]
    async with raw_server(*acts) as server, AsyncClient(server.url) as client:
        assert [m.id for m in (await client.models.list()).data] == ["org/m"]
        assert (await client.models.retrieve("org/m")).max_model_len == 512
        assert (await client.tokenize("Hi", model="m")).tokens == [1, 2]
        assert await client.detokenize([1, 2]) == "Hi"
        assert (await client.completions.create(prompt=[1], max_tokens=1)).choices[0].text == "x"
        assert (await client.responses.create(input="Hi")).id == "resp_1"
        assert (await client.responses.retrieve("resp_1")).status == "cancelled"
        assert (await client.responses.cancel("resp_1")).status == "cancelled"
    assert [f"{request.method} {request.path}" for request in server.requests] == [
        "GET /v1/models",
        "GET /v1/models/org%2Fm",
        "POST /tokenize",
        "POST /detokenize",
        "POST /v1/completions",
        "POST /v1/responses",
        "GET /v1/responses/resp_1",
        "POST /v1/responses/resp_1/cancel",
    ]
    assert server.requests[2].json() == {"prompt": "Hi", "model": "m"}
    assert server.requests[3].json() == {"tokens": [1, 2]}
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("given", "base_url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h/openai", "https://h/openai"),
    ],
)
def test_base_url(given: str, base_url: str) -> None:
    assert AsyncClient(given).base_url == base_url


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://h", "", "http://"])
def test_base_url_that_is_none(given: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        AsyncClient(given)


async def test_a_reply_is_history_for_the_next_request() -> None:
    async with raw_server(json_reply(WHOLE)) as server, AsyncClient(server.url) as client:
        message = (await ask(client)).choices[0].message
        await client.chat.completions.create(messages=[*MESSAGES, message])
    assert server.requests[1].json() == {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi"}]}
    assert Message(role="assistant", content="Hi") == message


async def test_cli_3_a_whole_reply_of_50_mb_and_headers_of_20_kb() -> None:
    text = "x" * 50_000_000
    whole = {"choices": [{"message": {"content": text}}]}
    async with raw_server(json_reply(whole, headers=f"X-Long: {'y' * 20_000}\r\n")) as server:
        async with AsyncClient(server.url) as client:
            reply = await ask(client)
    assert reply.choices[0].message.content == text


async def test_cli_3_a_whole_reply_has_a_bound() -> None:
    async with raw_server(json_reply({"x": "y" * 1000})) as server, AsyncClient(server.url) as client:
        call = make_call("GET", server.url, {}, None, Timeout())
        response = await client._api.http.open(call, Retries())
        with pytest.raises(ReplyTooLargeError, match="100 bytes"):
            await read_whole(response, call, max_bytes=100)


@pytest.mark.parametrize("body", [b"<html>login</html>", b"{half", b'{"choices": 7}', b"[1]", b""])
async def test_an_answer_that_cannot_be_read(body: bytes) -> None:
    async with raw_server(json_reply(body)) as server, AsyncClient(server.url) as client:
        with pytest.raises(APIResponseValidationError) as caught:
            await ask(client)
    assert caught.value.request_id


async def test_an_answer_of_another_type() -> None:
    async def html(exchange: Exchange) -> None:
        await exchange.send(HEAD % b"text/html" + b"Content-Length: 4\r\n\r\n<p/>")

    async with raw_server(html) as server, AsyncClient(server.url) as client:
        with pytest.raises(APIResponseValidationError, match="text/html"):
            await ask(client)


# -- errors --

KINDS: dict[str, type[APIStatusError]] = {
    "400 Bad Request": BadRequestError,
    "401 Unauthorized": AuthenticationError,
    "403 Forbidden": PermissionDeniedError,
    "404 Not Found": NotFoundError,
    "409 Conflict": ConflictError,
    "413 Too Large": APIStatusError,
    "422 Unprocessable": UnprocessableEntityError,
    "429 Too Many": RateLimitError,
    "500 Error": InternalServerError,
    "503 Unavailable": InternalServerError,
}


@pytest.mark.parametrize(("status", "kind"), KINDS.items())
async def test_status_classes(status: str, kind: type[APIStatusError]) -> None:
    async with raw_server(refusal(status, "X-Request-Id: r\r\n")) as server:
        async with AsyncClient(server.url, max_retries=0) as client:
            for stream_too in (False, True):
                with pytest.raises(kind) as caught:
                    await ask(client, stream=stream_too)
                error = caught.value
                assert type(error) is kind
                assert (error.status_code, error.request_id) == (int(status[:3]), "r")
                assert (error.type, error.code, error.param) == ("t", "c", "p")
                assert str(error) == f"Error code: {status[:3]} - no"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"object": "error", "message": "flat", "code": 400}', "flat"),
        (b'{"error": "bare"}', "bare"),
        (b'{"detail": "fastapi"}', "fastapi"),
        (b"plain text", "plain text"),
        (b"", "the server said nothing about it"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_the_message_is_found_wherever_it_is(raw: bytes, message: str) -> None:
    assert str(status_error(400, {}, raw, None)) == f"Error code: 400 - {message}"


def test_errors_can_be_copied_between_processes() -> None:
    error = status_error(429, {"retry-after": "1"}, b'{"error": {"message": "m", "code": "c"}}', "r")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code, again.headers) == (RateLimitError, str(error), "c", error.headers)


# -- CLI-5: retries --


async def requests_of(*acts: Act, stream: bool = False, **options: object) -> tuple[list[str], APIError | None]:
    """The request ids that the server saw, and how the call ended."""
    options = {"max_retries": SOON} | options
    error = None
    async with raw_server(*acts) as server, AsyncClient(server.url, **options) as client:  # type: ignore[arg-type]
        try:
            reply = await ask(client, stream=stream)
            if stream:
                async for _ in reply:  # type: ignore[attr-defined]
                    pass
        except APIError as caught:
            error = caught
    return [request.headers["x-request-id"] for request in server.requests], error


@pytest.mark.parametrize("streamed", [False, True])
async def test_cli_5_503_twice_then_an_answer_under_one_request_id(streamed: bool) -> None:
    good = chat_stream("a") if streamed else json_reply(WHOLE)
    ids, error = await requests_of(refusal("503 No"), refusal("503 No"), good, stream=streamed)
    assert (len(ids), len(set(ids)), error) == (3, 1, None)


async def test_cli_5_the_callers_request_id_is_kept() -> None:
    async with raw_server(refusal("503 No"), json_reply(WHOLE)) as server:
        async with AsyncClient(server.url, max_retries=SOON) as client:
            await ask(client, extra_headers={"x-request-id": "mine"})
    assert [request.headers["x-request-id"] for request in server.requests] == ["mine", "mine"]


@pytest.mark.parametrize("status", ["400 No", "401 No", "404 No", "413 No", "422 No"])
async def test_cli_5_what_is_the_callers_fault_is_not_tried_again(status: str) -> None:
    ids, error = await requests_of(refusal(status))
    assert (len(ids), isinstance(error, APIStatusError)) == (1, True)


@pytest.mark.parametrize("status", ["408 No", "409 No", "429 No", "500 No", "502 No"])
async def test_cli_5_what_may_pass_is_tried_as_often_as_allowed(status: str) -> None:
    ids, error = await requests_of(refusal(status))
    assert (len(ids), isinstance(error, APIStatusError)) == (3, True)


async def test_cli_5_x_should_retry_has_the_last_word() -> None:
    assert len((await requests_of(refusal("500 No", "x-should-retry: false\r\n")))[0]) == 1
    assert len((await requests_of(refusal("400 No", "x-should-retry: true\r\n")))[0]) == 3


@pytest.mark.parametrize("asked", ["-1", "x", "0", "inf", "nan"])
async def test_cli_5_nonsense_in_retry_after_falls_back_to_the_formula(asked: str) -> None:
    ids, _ = await requests_of(refusal("429 No", f"Retry-After: {asked}\r\n"))
    assert len(ids) == (1 if asked == "inf" else 3)


async def test_cli_5_a_retry_after_above_the_cap_or_the_deadline_is_not_waited_for() -> None:
    for asked in ("9999", email.utils.formatdate(time.time() + 9999)):
        ids, error = await requests_of(refusal("429 No", f"Retry-After: {asked}\r\n"))
        assert (len(ids), type(error)) == (1, RateLimitError)
    ids, error = await requests_of(refusal("429 No", "Retry-After: 100\r\n"), timeout=50)
    assert (len(ids), type(error)) == (1, RateLimitError)


def test_cli_5_delays() -> None:
    random.seed(0)
    retries = Retries(max_retries=10)

    def delays(attempt: int, **headers: str) -> list[float]:
        error = status_error(429, {name.replace("_", "-"): value for name, value in headers.items()}, b"", None)
        return [d for _ in range(200) if (d := retries.delay_s(error, attempt)) is not None]

    for attempt, most in ((0, 0.5), (1, 1.0), (3, 4.0), (4, 8.0), (9, 8.0)):
        assert 0.75 * most <= min(delays(attempt)) < max(delays(attempt)) <= most
    assert 2 <= min(delays(0, retry_after="2")) < max(delays(0, retry_after="2")) <= 2.5
    assert 100 <= min(delays(0, retry_after="100")) < max(delays(0, retry_after="100")) <= 102
    assert 0.25 <= min(delays(0, retry_after="9", retry_after_ms="250")) <= 0.32
    assert delays(0, retry_after="120.5") == []
    assert delays(10) == []


def test_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after_s({"retry-after": "2.5"}) == 2.5
    assert retry_after_s({"retry-after-ms": "x", "retry-after": "3"}) == 3
    in_ten = retry_after_s({"retry-after": email.utils.formatdate(time.time() + 10, usegmt=True)})
    assert in_ten is not None
    assert 5 < in_ten <= 10
    assert retry_after_s({"retry-after": "tomorrow"}) is None
    assert retry_after_s({}) is None


async def test_cli_5_a_silent_server_costs_one_generation_and_one_timeout() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.left()

    for streamed in (False, True):
        ids, error = await requests_of(silent, timeout=0.2, stream=streamed)
        assert (len(ids), type(error)) == (1, APITimeoutError)
        assert "0.2 s" in str(error)


async def test_cli_5_a_whole_reply_that_trickles_is_bounded_too() -> None:
    async def trickling(exchange: Exchange) -> None:
        await exchange.send(HEAD % b"application/json" + b"Content-Length: 100000\r\n\r\n")
        gone = asyncio.ensure_future(exchange.left())
        while not gone.done():
            await exchange.send(b" ")
            await asyncio.wait([gone], timeout=0.02)

    ids, error = await requests_of(trickling, timeout=0.2)
    assert (len(ids), type(error)) == (1, APITimeoutError)


async def test_cli_5_retries_end_at_the_deadline() -> None:
    """Refused at once, for ever: as many attempts as fit, and the last refusal is what the caller gets."""
    retries = Retries(max_retries=1000, first_delay_s=0.02, max_delay_s=0.02)
    ids, error = await requests_of(refusal("503 No"), timeout=0.2, max_retries=retries)
    assert type(error) is InternalServerError
    assert 2 < len(ids) < 20


async def test_cli_5_cut_after_the_headers_or_after_chunks_is_not_tried_again() -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        exchange.close()

    ids, error = await requests_of(cut, stream=True)
    assert (len(ids), type(error)) == (1, StreamTruncatedError)
    ids, error = await requests_of(stream(chat_event("a"), chat_event("b"), chat_event("c"), end=b""), stream=True)
    assert (len(ids), type(error)) == (1, StreamTruncatedError)

    async def cut_whole(exchange: Exchange) -> None:
        await exchange.send(HEAD % b"application/json" + b'Content-Length: 100\r\n\r\n{"id"')
        exchange.close()

    ids, error = await requests_of(cut_whole)
    assert (len(ids), type(error)) == (1, APIConnectionError)


async def hang_up(exchange: Exchange) -> None:
    exchange.close()


async def test_cli_5_a_disconnect_before_the_answer_is_tried_again() -> None:
    ids, error = await requests_of(hang_up, json_reply(WHOLE))
    assert (len(ids), len(set(ids)), error) == (2, 1, None)


async def test_cli_5_no_server_is_a_connection_error() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    async with AsyncClient(f"http://127.0.0.1:{port}", max_retries=SOON) as client:
        with pytest.raises(APIConnectionError):
            await ask(client)


async def test_cli_5_a_stale_pooled_connection_is_tried_once_more_without_retries() -> None:
    async with raw_server(json_reply(WHOLE), hang_up, json_reply(WHOLE)) as server:
        async with AsyncClient(server.url, max_retries=0) as client:
            await ask(client)
            await ask(client)
    assert [request.connection for request in server.requests] == [1, 1, 2]
    # Only once, and only on a connection that had been used before.
    async with raw_server(json_reply(WHOLE), hang_up) as server, AsyncClient(server.url, max_retries=0) as client:
        await ask(client)
        with pytest.raises(APIConnectionError):
            await ask(client)
        assert len(server.requests) == 3
        with pytest.raises(APIConnectionError):
            await ask(client)
        assert len(server.requests) == 4


async def test_a_number_as_timeout() -> None:
    assert Timeout.of(30, stream=False) == Timeout(connect=5, read=30, total=30)
    assert Timeout.of(2, stream=True) == Timeout(connect=2, read=2, total=None)
    assert Timeout.of(None, stream=True) == Timeout(connect=None, read=None, total=None)


# -- sessions and loops --


def test_a_client_refuses_another_loop() -> None:
    client = AsyncClient("http://127.0.0.1:1")

    async def touch() -> None:
        assert client._api.http.session

    with asyncio.Runner() as runner, asyncio.Runner() as other:
        runner.run(touch())
        with pytest.raises(RuntimeError, match="another event loop"):
            other.run(touch())
        runner.run(client.aclose())


async def test_a_closed_client_says_so_and_closes_twice() -> None:
    async with raw_server(json_reply(WHOLE)) as server:
        client = AsyncClient(server.url)
        await ask(client)
        await client.aclose()
        await client.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            await ask(client)


async def test_a_callers_session_is_used_and_never_closed() -> None:
    async with raw_server(json_reply(WHOLE)) as server, aiohttp.ClientSession() as session:
        async with AsyncClient(server.url, session=session) as client:
            await ask(client)
        assert not session.closed


async def test_with_options_shares_the_connections() -> None:
    async with raw_server(refusal("503 No"), json_reply(WHOLE)) as server:
        async with AsyncClient(server.url, max_retries=0) as client:
            again = client.with_options(max_retries=SOON, api_key="k", default_headers={"X-A": "1"}, timeout=3)
            await ask(again)
            assert server.requests[1].headers["authorization"] == "Bearer k"
            assert server.num_connections == 1
            with pytest.raises(TypeError, match="flavour"):
                client.with_options(flavour=1)


async def test_more_streams_at_once_than_any_pool_limit() -> None:
    num = 300
    all_here = asyncio.Event()
    waiting = 0

    async def act(exchange: Exchange) -> None:
        nonlocal waiting
        await exchange.send(SSE_HEAD)
        waiting += 1
        if waiting == num:
            all_here.set()
        await all_here.wait()
        await exchange.chunk(chat_event("a") + chat_event(finish="stop") + DONE)
        await exchange.send(b"0\r\n\r\n")

    async def one(client: AsyncClient) -> str:
        async with client.chat.completions.stream(messages=MESSAGES) as running:
            return await running.get_final_text()

    async with raw_server(act) as server, AsyncClient(server.url) as client:
        assert await asyncio.gather(*[one(client) for _ in range(num)]) == ["a"] * num
