"""Readers of what strangers send, under atheris: `python -m tests.attacks.fuzz sse|json|tree 600` (seconds).

Coverage leads the mutations; `tree` turns them into JSON of the fields there are (by hypothesis), as msgspec's C has
no coverage to lead through syntax. A crash is an exception that is none of ours; its input is written to crash-*.
The suite runs the same properties under hypothesis alone (test_readers.py).
"""

import sys
from collections.abc import Callable
from typing import Any

from asyncllm.errors import InvalidRequest
from asyncllm.wire import anthropic, requests, responses
from asyncllm.wire.sse import Decoder, EventTooLarge

JSON_READERS: tuple[Callable[[bytes], object], ...] = (
    requests.decode_chat, requests.decode_completion, responses.decode_response, anthropic.decode_messages,
    anthropic.decode_count,
)  # fmt: skip
SOCKET_READERS: tuple[Callable[[bytes], object], ...] = (
    responses.decode_envelope, responses.decode_response, responses.decode_cancel, responses.decode_update,
    responses.decode_attach,
)  # fmt: skip


def check_sse(data: bytes) -> None:
    """However the bytes are cut, the events are the same; what is too large says so."""
    whole = Decoder(4096)
    try:
        events = whole.feed(data)
    except EventTooLarge:
        return
    cut = data[0] % 7 + 1 if data else 1
    pieces = Decoder(4096)
    assert [event for i in range(0, len(data), cut) for event in pieces.feed(data[i : i + cut])] == events
    assert pieces.retry_ms == whole.retry_ms


def check_json(data: bytes, readers: tuple[Callable[[bytes], object], ...] = JSON_READERS) -> None:
    """A request, or an InvalidRequest that says why not; and if a request, then its parameters can be made or not."""
    for read in readers:
        try:
            read(data)
        except InvalidRequest as error:
            assert str(error)
    for decode, params in (
        (requests.decode_chat, requests.chat_params), (requests.decode_completion, requests.completion_params),
    ):  # fmt: skip
        try:
            params(decode(data))  # type: ignore[operator]
        except InvalidRequest:
            pass


def check_socket(data: bytes) -> None:
    check_json(data, SOCKET_READERS)


def check_all(data: bytes) -> None:
    check_json(data)
    check_socket(data)


def main() -> None:
    import atheris

    from .test_readers import test_json_is_a_request_or_is_refused as tree

    checks: dict[str, Any] = {"sse": check_sse, "json": check_all, "tree": tree.hypothesis.fuzz_one_input}
    check, seconds = checks[sys.argv[1]], sys.argv[2]
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10"], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
