"""Malformed, slow and too many: what a hostile peer can do with HTTP before any route is met. Rows 13 to 20, 36."""

import json
import time

import pytest

from tests.e2e.process import ServerProcess

from .raw import JSON, UPGRADE, Raw, replies, until_true

HOST = "Host: localhost\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 1})
POST = f"POST /v1/completions HTTP/1.1\r\n{HOST}{JSON}"
HIDDEN = f"GET /v1/models HTTP/1.1\r\n{HOST}\r\n"  # the request that a smuggler hides in a body

MALFORMED = {
    "not http": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 40 + "\r\n\r\n",
    "no version": f"GET /v1/models\r\n{HOST}\r\n",
    "version": f"GET /v1/models HTTP/9.9\r\n{HOST}\r\n",
    "HTTP/2 in words": f"GET /v1/models HTTP/2.0\r\n{HOST}\r\n",
    "method": f"G\x07T /v1/models HTTP/1.1\r\n{HOST}\r\n",
    "control in the path": f"GET /v1/\x00models HTTP/1.1\r\n{HOST}\r\n",
    "no colon": f"GET /v1/models HTTP/1.1\r\n{HOST}Nonsense\r\n\r\n",
    "space before the colon": f"GET /v1/models HTTP/1.1\r\n{HOST}X-A : b\r\n\r\n",
    "obs-fold": f"GET /v1/models HTTP/1.1\r\n{HOST}X-A: b\r\n c: d\r\n\r\n",
    "null in a value": f"GET /v1/models HTTP/1.1\r\n{HOST}X-A: \x00\r\n\r\n",
    "bare carriage return": f"GET /v1/models HTTP/1.1\r\n{HOST}X-A: b\rX-B: c\r\n\r\n",
    "length and chunks": f"{POST}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "two lengths": f"{POST}Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345{HIDDEN}",
    "length list": f"{POST}Content-Length: 5, 5\r\n\r\n12345{HIDDEN}",
    "length with a sign": f"{POST}Content-Length: +5\r\n\r\n12345{HIDDEN}",
    "length below zero": f"{POST}Content-Length: -1\r\n\r\n{HIDDEN}",
    "length in hex": f"{POST}Content-Length: 0x5\r\n\r\n12345{HIDDEN}",
    "length of 30 digits": f"{POST}Content-Length: {'9' * 30}\r\n\r\n{HIDDEN}",
    "unknown coding": f"{POST}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "coding behind chunked": f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{HIDDEN}",
    "coding before chunked": f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "no coding": f"{POST}Transfer-Encoding: \r\n\r\n{HIDDEN}",
    "chunked in HTTP/1.0": f"{POST.replace('1.1', '1.0')}Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
    f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
    "another host in the target": f"GET http://evil.example/v1/models HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
    "a socket over HTTP/1.0": UPGRADE.replace("1.1", "1.0"),
    "a socket's key beyond ASCII": UPGRADE.replace("AAAAAAAA", "\xff\xff"),
    "a socket with a body": UPGRADE.replace("\r\n\r\n", "\r\nContent-Length: 5\r\n\r\n12345"),
    "no host": "GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": f"GET /v1/models HTTP/1.1\r\n{HOST}Host: evil.example\r\n\r\n",
}
TOO_LARGE = {
    "field of 9 kB": f"GET /v1/models HTTP/1.1\r\n{HOST}X-A: {'a' * 9000}\r\n\r\n",
    "200 fields": f"GET /v1/models HTTP/1.1\r\n{HOST}" + "".join(f"X-{i}: a\r\n" for i in range(200)) + "\r\n",
    "5000 fields": f"GET /v1/models HTTP/1.1\r\n{HOST}" + "".join(f"X-{i}: a\r\n" for i in range(5000)) + "\r\n",
    "name of 9 kB": f"GET /v1/models HTTP/1.1\r\n{HOST}X-{'a' * 9000}: a\r\n\r\n",
    "path of 9 kB": f"GET /{'a' * 9000} HTTP/1.1\r\n{HOST}\r\n",
}
BROKEN_CHUNKS = {
    "size": "zz\r\nab\r\n0\r\n\r\n",
    "size with a sign": "+2\r\nab\r\n0\r\n\r\n",
    "size with 0x": "0x2\r\nab\r\n0\r\n\r\n",
    "size of 20 digits": "f" * 20 + "\r\nab\r\n0\r\n\r\n",
    "end": "2\r\nabXX0\r\n\r\n",
    "bare line feed": "2\nab\n0\n\n",
    "trailers": "0\r\n" + "X: a\r\n" * 300 + "\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_http_is_refused_in_json_and_the_connection_closed(server: ServerProcess, data: str) -> None:
    """One answer: what was hidden behind the refused head is no request."""
    with Raw(server) as raw:
        raw.send(data)
        [reply] = replies(raw.rest())
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
    assert reply.headers["server"] == "asyncllm"


@pytest.mark.parametrize("data", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_head_beyond_the_limits_is_told_them(server: ServerProcess, data: str) -> None:
    with Raw(server) as raw:
        raw.send(data)
        [reply] = replies(raw.rest())
    assert (reply.status, reply.error["code"]) == (431, "head_too_large")
    assert "128 fields" in reply.error["message"] and "8190 bytes" in reply.error["message"]


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS.keys())
def test_broken_chunks_are_refused(server: ServerProcess, chunks: str) -> None:
    with Raw(server) as raw:
        raw.send(f"{POST}Transfer-Encoding: chunked\r\n\r\n{chunks}{HIDDEN}")
        answers = replies(raw.rest())
    status = 431 if chunks == BROKEN_CHUNKS["trailers"] else 400  # fields like others, where they come with the head
    assert [reply.status for reply in answers] == [status] and answers[0].error


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS.keys())
def test_broken_chunks_are_refused_when_they_come_alone(server: ServerProcess, chunks: str) -> None:
    """Their head has been read, and somebody waits for the body: no later than they are seen to be broken."""
    with Raw(server) as raw:
        raw.send(f"{POST}Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
        raw.until(b"100 Continue\r\n\r\n")
        raw.send(f"{chunks}{HIDDEN}")
        answers = replies(raw.rest())
    assert [reply.status for reply in answers] == [400] and answers[0].error
    assert answers[0].headers["connection"] == "close"


def test_one_escaped_line_a_malformed_request(server: ServerProcess) -> None:
    seen = len(server.stderr().splitlines())
    with Raw(server) as raw:
        raw.send("GET /secret\x1b[31m\x00 HTTP/1.1\r\nX: prompt\r\n\r\n")
        raw.rest()
    until_true(lambda: len(server.stderr().splitlines()) > seen)
    [line] = server.stderr().splitlines()[seen:]
    assert "malformed HTTP from 127.0.0.1" in line and "secret" not in line and "\x1b" not in line


def test_heads_that_dribble_or_stop_are_given_up(server: ServerProcess) -> None:
    """The server of these tests gives a head 1 s, the default is 15: row 18."""
    quiet = [Raw(server) for _ in range(20)]
    begun = [Raw(server) for _ in range(20)]
    for raw in begun:
        raw.send("GET /health HT")
    began_s = time.monotonic()
    with Raw(server) as dribbler:
        for letter in "TP/1.1\r\nX-A: " + "a" * 100:
            try:
                dribbler.send(letter)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.05)
        assert time.monotonic() - began_s < 4
    for raw in (*quiet, *begun):
        [reply] = replies(raw.rest())
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        raw.socket.close()
    assert time.monotonic() - began_s < 8


def test_a_second_head_that_dribbles_is_given_up_too(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.send(f"GET /health HTTP/1.1\r\n{HOST}\r\n")
        assert raw.reply().status == 200
        raw.send("GET /hea")
        [reply] = replies(raw.rest())
        assert reply.status == 408


def test_an_idle_connection_outlives_the_heads_time(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.send(f"GET /health HTTP/1.1\r\n{HOST}\r\n")
        assert raw.reply().status == 200
        time.sleep(1.3)
        raw.send(f"GET /health HTTP/1.1\r\n{HOST}\r\n")
        assert raw.reply().status == 200


def test_a_body_that_dribbles_is_given_up(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.send(f"{POST}Content-Length: 1000\r\n\r\n")
        for _ in range(10):
            raw.send("{")
            time.sleep(0.05)
        [reply] = replies(raw.rest())
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")


def test_a_flood_of_one_byte_chunks_is_bounded(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.send(f"{POST}Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(30):
                raw.send("1\r\n \r\n" * 10_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answers = replies(raw.rest())
    assert not answers or answers[0].status in (408, 413)
    assert server.get("/health")["status"] == "ok"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_compressed_bodies_are_refused_unopened(server: ServerProcess, coding: str) -> None:
    before = server.rss_bytes()
    with Raw(server) as raw:
        raw.post("/v1/completions", b"\x1f\x8b" + b"\0" * 100_000, f"Content-Encoding: {coding}\r\n")
        assert raw.reply().status == 415
    assert server.rss_bytes() - before < 32 << 20


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_wrong_types_are_refused_on_every_route(server: ServerProcess, path: str, kind: str) -> None:
    with Raw(server) as raw:
        raw.send(f"POST {path} HTTP/1.1\r\n{HOST}Content-Type: {kind}\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}")
        assert raw.reply().status == 415


def test_a_stream_to_http_1_0_ends_with_its_connection(server: ServerProcess) -> None:
    """It has no chunks: what came behind it would be read as more of it."""
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True})
    head = f"{POST.replace('HTTP/1.1', 'HTTP/1.0')}Connection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    with Raw(server) as raw:
        raw.send(f"{head}{body}{HIDDEN}")
        data = raw.rest()
    assert data.endswith(b"data: [DONE]\n\n") and data.count(b"HTTP/1.") == 1


def test_a_head_takes_no_events_from_who_follows_them(server: ServerProcess) -> None:
    with Raw(server) as raw:
        for path in ("/v1/responses/resp_x/events", "/v1/responses/resp_x?stream=true"):
            raw.send(f"HEAD {path} HTTP/1.1\r\n{HOST}\r\n")
            assert b" 405 " in raw.until(b"\r\n\r\n").splitlines()[0]
        raw.send(HIDDEN)
        assert raw.reply().status == 200, "nothing but heads came before it"


def test_expect(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.send(f"{POST}Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n")
        assert raw.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        raw.send(BODY)
        assert raw.reply().status == 200
    with Raw(server) as raw:
        raw.send(f"{POST}Expect: miracles\r\nContent-Length: {len(BODY)}\r\n\r\n")
        [reply] = replies(raw.rest())
        assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
    with Raw(server) as raw:
        raw.send(f"{POST}Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n")
        [reply] = replies(raw.rest())
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_a_thousand_requests_in_one_breath_are_answered_in_order(server: ServerProcess) -> None:
    with Raw(server) as raw:
        paths = ["/health", "/version", "/v1/models"]
        wanted = [paths[i % 3] for i in range(999)]
        last = f"GET /nowhere HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"
        raw.send("".join(f"GET {path} HTTP/1.1\r\n{HOST}\r\n" for path in wanted) + last)
        answers = replies(raw.rest())
    keys = {"/health": "status", "/version": "version", "/v1/models": "object"}
    assert [keys[path] in json.loads(reply.body) for path, reply in zip(wanted, answers, strict=False)] == [True] * 999
    assert answers[-1].status == 404


def test_a_half_closed_request_is_answered_or_dropped_but_never_held(server: ServerProcess) -> None:
    with Raw(server) as raw:
        raw.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        raw.socket.shutdown(1)
        raw.rest()
    until_true(lambda: server.metrics()["requests_live"] == 0)


def test_whoever_leaves_hard_leaves_nothing(server: ServerProcess) -> None:
    for i in range(60):
        raw = Raw(server)
        if i % 3:
            raw.send(f"{POST}Content-Length: 1000\r\n\r\n{{" if i % 3 == 1 else "GET /hea")
        raw.reset()
    until_true(lambda: server.metrics()["requests_live"] == 0)


def test_json_that_nests_or_counts_too_far(server: ServerProcess) -> None:
    with Raw(server) as raw:
        for body in (
            b'{"prompt":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
            b'{"unknown":' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
            b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
            b'{"prompt":"x","temperature":' + b"9" * 5000 + b"}",
            b'{"prompt":"\\ud800"}',
            b'{"prompt":"\xff"}',
            b'\xef\xbb\xbf{"prompt":"x"}',
        ):
            raw.post("/v1/completions", body)
            reply = raw.reply()
            assert reply.status == 400 and reply.error["type"] == "invalid_request_error", body[:40]
