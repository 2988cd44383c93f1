"""Keys, Host, Origin, the operators' own address and TLS, on the real process: rows 21 to 24."""

import base64
import json
import os
import re
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import ROOT, ServerProcess

from .raw import Raw, Reply, replies

KEY, OTHER = "sk-test-0123456789", "sk-other-9876543210"
ROUTES = (
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "GET /v1/responses",
    "GET /v1/responses/resp_1", "DELETE /v1/responses/resp_1", "GET /v1/responses/resp_1/events",
    "POST /v1/responses/resp_1/cancel", "GET /v1/models", "GET /v1/models/x", "POST /tokenize", "POST /detokenize",
    "GET /tokenizer_info", "GET /version", "GET /metrics", "GET /nowhere", "PUT /v1/models", "OPTIONS *",
    "GET //health", "GET /health/", "GET /HEALTH", "GET /%68ealth", "GET /health?x=1", "GET /health/../metrics",
    "GET /v1/..%2fhealth", "GET http://x/health", "GET /;/health", "CONNECT x:1", "TRACE /",
)  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# who may ask\nalice {KEY}\n\nbob {OTHER}\n")
    arguments = ["--api-key-file", str(keys), "--allowed-origin", "https://app.example", "--log-level", "info"]
    arguments += ["--requests-per-minute", "30", "--admin-port", str(admin_port), "--allowed-host", "llm.example"]
    with ServerProcess(str(checkpoint), *arguments) as running:
        yield running
        told = running.stderr()
        assert "Traceback" not in told and KEY not in told and OTHER not in told and "wrong-key" not in told


def ask(server: ServerProcess, line: str, *fields: str, body: str = "", host: str = "llm.example") -> Reply:
    with Raw(server) as raw:
        head = "".join(f"{field}\r\n" for field in fields)
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        raw.send(f"{line} HTTP/1.1\r\nHost: {host}\r\n{head}{length}Connection: close\r\n\r\n{body}")
        heard = raw.rest()
    assert KEY.encode() not in heard and OTHER.encode() not in heard
    return replies(heard)[0]


@pytest.mark.parametrize("line", ROUTES)
def test_without_a_key_every_path_and_every_spelling_is_refused(guarded: ServerProcess, line: str) -> None:
    for fields in ((), ("Authorization: Bearer wrong-key-0000",), ("X-Forwarded-For: 127.0.0.1",)):
        reply = ask(guarded, line, *fields)
        assert reply.status in (400, 401)
        if reply.status == 401:
            assert (reply.error["code"], reply.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}",
        "Bearer schlüssel-😀".encode().decode("latin-1"), f"Bearer {KEY}\r\nAuthorization: Bearer {KEY}",
        f"Bearer {KEY} {KEY}", "Bearer " + "x" * 8000,
    ],
)  # fmt: skip
def test_a_wrong_key_is_401_and_never_500(guarded: ServerProcess, value: str) -> None:
    assert ask(guarded, "GET /v1/models", f"Authorization: {value}").status == 401


def test_the_right_key_opens_and_health_needs_none(guarded: ServerProcess) -> None:
    assert ask(guarded, "GET /v1/models", f"Authorization: Bearer {KEY}").status == 200
    assert ask(guarded, "GET /v1/models", f"authorization: bearer {OTHER}").status == 200
    assert ask(guarded, "GET /health").status == ask(guarded, "GET /ready").status == 200


def test_a_websocket_needs_a_key_too(guarded: ServerProcess) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    nonce = f"Sec-WebSocket-Key: {base64.b64encode(secrets.token_bytes(16)).decode()}"
    assert ask(guarded, "GET /v1/responses", *upgrade, nonce).status == 401
    with Raw(guarded) as raw:
        fields = "\r\n".join((*upgrade, nonce, f"Authorization: Bearer {KEY}"))
        raw.send(f"GET /v1/responses HTTP/1.1\r\nHost: llm.example\r\n{fields}\r\n\r\n")
        assert raw.until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")


def test_another_keys_response_is_not_found(guarded: ServerProcess) -> None:
    body = json.dumps({"input": "x", "max_output_tokens": 2})
    json_type = "Content-Type: application/json"
    made = ask(guarded, "POST /v1/responses", json_type, f"Authorization: Bearer {KEY}", body=body)
    name = json.loads(made.body)["id"]
    assert ask(guarded, f"GET /v1/responses/{name}", f"Authorization: Bearer {KEY}").status == 200
    for line in (f"GET /v1/responses/{name}", f"DELETE /v1/responses/{name}", f"POST /v1/responses/{name}/cancel"):
        reply = ask(guarded, line, json_type, f"Authorization: Bearer {OTHER}", body="{}" if "POST" in line else "")
        assert (reply.status, reply.error["code"]) == (404, "response_not_found")
    behind = json.dumps({"input": "x", "max_output_tokens": 2, "previous_response_id": name})
    reply = ask(guarded, "POST /v1/responses", json_type, f"Authorization: Bearer {OTHER}", body=behind)
    assert reply.error["code"] == "previous_response_not_found"


def test_a_rate_is_each_keys_own(guarded: ServerProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    asked = ("POST /v1/completions", "Content-Type: application/json", f"Authorization: Bearer {KEY}")
    answers = [ask(guarded, *asked, body=body) for _ in range(32)]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) >= 2 and answers[0].status == 200
    assert refused[0].error["code"] == "rate_limit_exceeded" and 1 <= int(refused[0].headers["retry-after"]) <= 2
    assert ask(guarded, *asked[:2], f"Authorization: Bearer {OTHER}", body=body).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost", "x/#", "llm.example@evil.example", "evil@llm.example", "llm.example/evil",
             "llm.example#evil", "llm.example:abc", "[::1", "", "a b"],
)  # fmt: skip
def test_a_foreign_host_is_refused(guarded: ServerProcess, host: str) -> None:
    reply = ask(guarded, "GET /v1/models", f"Authorization: Bearer {KEY}", host=host)
    assert reply.status in (400, 403)


def test_addresses_and_named_hosts_are_served(guarded: ServerProcess) -> None:
    for host in ("llm.example", "LLM.example:8000", "127.0.0.1", "[::1]:80", "10.0.0.7"):
        assert ask(guarded, "GET /v1/models", f"Authorization: Bearer {KEY}", host=host).status == 200


def test_cors_answers_named_origins_alone(guarded: ServerProcess) -> None:
    question = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization")
    reply = ask(guarded, "OPTIONS /v1/completions", "Origin: https://app.example", *question)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "https://app.example")
    for asked, allowed in (
        ("authorization, x-stainless-lang,anthropic-version", "authorization, x-stainless-lang,anthropic-version"),
        ("x" * 2000, "Authorization"), ("a b", "Authorization"), ("", "Authorization"),
    ):  # fmt: skip
        asking = ("Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {asked}")
        reply = ask(guarded, "OPTIONS /v1/completions", "Origin: https://app.example", *asking)
        assert reply.headers["access-control-allow-headers"].startswith(allowed)
    for origin in ("https://evil.example", "null", "https://app.example.evil.example"):
        reply = ask(guarded, "OPTIONS /v1/completions", f"Origin: {origin}", *question)
        assert reply.status == 401 and "access-control-allow-origin" not in reply.headers
    key = f"Authorization: Bearer {OTHER}"
    reply = ask(guarded, "GET /v1/models", "Origin: https://app.example", key)
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in ask(guarded, "GET /v1/models", "Origin: https://x.example", key).headers
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    json_type = "Content-Type: application/json"
    for origin, status in (("https://app.example", 200), ("https://evil.example", 403), ("null", 403)):
        reply = ask(guarded, "POST /v1/completions", json_type, key, f"Origin: {origin}", body=body)
        assert reply.status == status


def test_metrics_are_on_the_operators_address_alone(guarded: ServerProcess, admin_port: int) -> None:
    assert ask(guarded, "GET /metrics", f"Authorization: Bearer {KEY}").status == 404
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics") as reply:
        text = reply.read().decode()
    assert "asyncllm_requests_running" in text
    assert KEY not in text and not re.search(r'(path|model|key|ip)="', text)
    foreign = urllib.request.Request(f"http://127.0.0.1:{admin_port}/metrics", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(foreign)
    assert caught.value.code == 403
    caught.value.close()
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/v1/models")
    missing.value.close()


def test_what_comes_from_outside_is_one_escaped_line_or_none(guarded: ServerProcess) -> None:
    before = len(guarded.stderr().splitlines())
    for line, *fields in (
        ("GET /\u2028x", "X-Request-Id: a\x1b[2J"),
        ("BREW /pot",),
        ("GET /%0d%0aINFO:%20fine", f"Authorization: Bearer {KEY}"),
        ("GET /v1/models/%1b%5b31m", f"Authorization: Bearer {KEY}"),
    ):
        with Raw(guarded) as raw:
            head = "".join(f"{field}\r\n" for field in fields)
            raw.send(f"{line} HTTP/1.1\r\nHost: llm.example\r\n{head}Connection: close\r\n\r\n".encode())
            raw.rest()
    told = guarded.stderr().splitlines()[before:]
    assert all(re.match(r"\d{4}-\d\d-\d\d .* (INFO|WARNING) asyncllm\.", line) for line in told), told
    assert not any("\x1b" in line or "\u2028" in line for line in told)


@pytest.fixture(scope="module")
def certificate() -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself, for a hundred years; its key is a secret to nobody."""
    folder = Path(__file__).with_name("tls")
    return folder / "cert.pem", folder / "key.pem"


def test_tls(checkpoint: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with ServerProcess(str(checkpoint), "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(f"{server.url}/health", context=trusting) as reply:
            assert reply.status == 200
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{server.url}/health", context=ssl.create_default_context())
        with Raw(server) as plain:  # speaks HTTP to a TLS port
            plain.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.rest()
        with Raw(server) as leaver:
            leaver.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with urllib.request.urlopen(f"{server.url}/health", context=trusting) as reply:
            assert reply.status == 200
        assert server.stop() == 0 and "Traceback" not in server.stderr()


def test_without_the_parser_in_c_there_is_no_start(checkpoint: Path) -> None:
    environment = os.environ | {"AIOHTTP_NO_EXTENSIONS": "1"}
    command = [sys.executable, "-m", "asyncllm", "serve", str(checkpoint), "--port", "0"]
    failed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and "without its parser in C" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ssl-certfile", "{cert}"], "needs both"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{cert}"], "cannot be used"),
        (["--ssl-certfile", "no.pem", "--ssl-keyfile", "no.pem"], "cannot be used"),
        (["--api-key", "short"], "at least 8 characters"),
        (["--api-key-file", os.devnull], "none is there"),
        (["--api-key", "samesame", "--api-key", "samesame"], "two API keys"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_loads(
    checkpoint: Path, certificate: tuple[Path, Path], arguments: list[str], told: str
) -> None:
    flags = [argument.format(cert=certificate[0]) for argument in arguments]
    command = [sys.executable, "-m", "asyncllm", "serve", str(checkpoint), *flags, "--port", "0"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and told in failed.stderr
    assert "Traceback" not in failed.stderr and "samesame" not in failed.stderr
