"""Bodies that are no JSON: half of a surrogate pair is found, and named with its field."""

import json

import pytest

from asyncllm.errors import InvalidRequest
from asyncllm.wire import broken, requests


@pytest.mark.parametrize(
    ("body", "param", "escape"),
    [
        (r'{"prompt": "a\ud800b"}', "prompt", r"\ud800"),
        (r'{"prompt": "a\udfff"}', "prompt", r"\udfff"),
        (r'{"prompt": "x", "stop": ["a", "\ud83d\ude00\uD83D"]}', "stop[1]", r"\uD83D"),
        (r'{"prompt": "x", "guided_json": {"enum": [{"a": "\udc00\ud800"}]}}', "guided_json.enum[0].a", r"\udc00"),
        (r'{"prompt": "x", "logit_bias": {"\ud800": 1}}', "logit_bias", r"\ud800"),
        (r'{"prompt": "\ud800\\udc00"}', "prompt", r"\ud800"),
        (r'{"\ud800": 1}', None, r"\ud800"),
        (r'{"prompt": "\ud800"', None, r"\ud800"),
    ],
)
def test_half_of_a_pair_is_named(body: str, param: str | None, escape: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests.decode_completion(body.encode())
    assert caught.value.param == param
    assert f"half of a surrogate pair, {escape} at byte {body.index(escape)}" in str(caught.value)


@pytest.mark.parametrize("body", [r'{"prompt": "\ud83d\ude00 \\ud800"', '{"prompt": "x",}', "", '{"prompt": "\\u12"}'])
def test_what_is_broken_otherwise_says_so(body: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        requests.decode_completion(body.encode())


def test_pairs_are_characters() -> None:
    assert requests.decode_completion(rb'{"prompt": "\ud83d\ude00\\ud800"}').prompt == "😀\\ud800"


def test_nothing_is_searched_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken, "_MAX_READ_BYTES", 100)
    body = json.dumps({"prompt": "\ud800" + "x" * 100}).encode()
    with pytest.raises(InvalidRequest, match="the body holds half") as caught:
        requests.decode_completion(body)
    assert caught.value.param is None
    monkeypatch.setattr(broken, "_MAX_SEARCHED_BYTES", 5)
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        requests.decode_completion(body)
