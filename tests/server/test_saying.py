"""Log probabilities of responses: each belongs to the text that its token wrote, whatever else the answer says."""

import random
from typing import Any

import pytest

from asyncllm.server.parting import Parting
from asyncllm.server.saying import PieceReader
from asyncllm.text.answer import AnswerParser
from asyncllm.text.pieces import Kind
from asyncllm.text.reasoning import TAGS, Splitter
from asyncllm.text.tools import FORMS, CallParser
from asyncllm.types import Logprob, TokenSpan
from asyncllm.wire.items import Piece

from ..text import toys
from ..text.test_answer import FORM_NAMES, NAMES, random_cut, random_text
from .conftest import Serve
from .test_responses import LONG, WEATHER, ask, reading

TOLD = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Brno"}}</tool_call>'


def messages(response: Any) -> list[Any]:
    return [item["content"][0] for item in response["output"] if item["type"] == "message"]


def spelled(logprobs: list[Any]) -> str:
    return bytes([byte for one in logprobs for byte in one["bytes"]]).decode()


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("<think>hm</think>\n\nSo be it.", ["So be it.<|im_end|>"]),
        (f"So: {CALL}", ["So:"]),
        (f"<think>hm</think>Žluť 🙂{CALL}behind", ["Žluť 🙂", "behind<|im_end|>"]),
        ("one<think>two</think>three</think>four", ["one", "threefour<|im_end|>"]),
        ("a <tool_call>no call", ["a <tool_call>no call<|im_end|>"]),
        (CALL, []),
        ("<think>for ever", []),
        ("nothing but this\n", ["nothing but this\n<|im_end|>"]),
        ("So STOP and on", ["So "]),
        ("<think>STOP", [""]),
        ("So \u270b on", ["So "]),  # whose first bytes write nothing, and belong to what is not shown
    ],
)
async def test_logprobs_are_of_the_text_alone_streamed_as_whole(serve: Serve, answer: str, texts: list[str]) -> None:
    async with serve(answer, template=toys.TOOLS, **LONG) as served:
        fields = TOLD | {"tools": [WEATHER], "stop": ["STOP", "\u270b"]}
        whole = await ask(served, **fields)
        assert [spelled(part["logprobs"]) for part in messages(whole)] == texts
        async with reading(served, **fields) as stream:
            events = await stream.rest()
    last = events[-1]["response"]
    assert [part | {"text": ""} for part in messages(last)] == [part | {"text": ""} for part in messages(whole)]
    for item in last["output"]:
        own = [event for event in events if event.get("item_id") == item["id"]]
        deltas = [event.get("logprobs") for event in own if event["type"].endswith(".delta")]
        if item["type"] == "message":
            assert [one for told in deltas for one in told] == item["content"][0]["logprobs"]
            assert all(len(one["top_logprobs"]) == 2 for one in item["content"][0]["logprobs"])
            assert [event["logprobs"] for event in own if event["type"].endswith("text.done")] == [
                item["content"][0]["logprobs"]
            ]
        else:
            assert deltas and set(map(str, deltas)) == {"None"}


class Tokens:
    """A stream whose tokens are cut anywhere, some of them empty, and arrive some at a time."""

    def __init__(self, rng: random.Random, text: str) -> None:
        self.text = text
        self.tokens: list[TokenSpan] = []
        at = 0
        for token_id, piece in enumerate(random_cut(rng, text)):
            self.tokens.append(TokenSpan(at, at + len(piece), Logprob(token_id, 0.0, ())))
            at += len(piece)
        self.num_read = 0
        self.ends = sorted(rng.choices(range(len(self.tokens) + 1), k=rng.choice((0, 2, 9))))
        self.ended = False

    def writes(self, i: int) -> bool:
        return self.tokens[i].start < self.tokens[i].end

    def track_spans(self) -> None:
        pass

    def take_spans(self) -> tuple[str, list[TokenSpan]]:
        new = self.tokens[self.num_read : (self.ends.pop(0) if self.ends else len(self.tokens))]
        self.num_read += len(new)
        return "".join([self.text[one.start : one.end] for one in new]), new

    def read(self, parser: AnswerParser) -> list[Piece]:
        parting = Parting(new_parser=lambda: parser, call_id=str, tells_reasoning=True, shown=())
        reader = PieceReader(self, parting, lambda entries: [{"id": one.token_id} for one in entries])  # type: ignore[arg-type]
        pieces: list[Piece] = []
        while not self.ended:
            self.ended = not self.ends
            pieces += reader.take()
        return pieces


def parser(form: str | None, tags: str | None) -> AnswerParser:
    splitter = Splitter(TAGS[tags], is_open=False) if tags else None
    return AnswerParser(splitter, CallParser(FORMS[form], NAMES) if form else None)


def letters_of_content(one: AnswerParser, text: str) -> list[int]:
    """Where they stand in the answer."""
    pieces = [*one.push(text), *one.finish()]
    return [at for kind, said, start in pieces if kind is Kind.CONTENT for at in range(start, start + len(said))]


def test_each_token_is_told_once_with_the_first_of_the_text_it_wrote() -> None:
    """And none with a text that it wrote nothing of, but those that wrote nothing at all."""
    rng = random.Random(6)
    num_told = num_hidden = 0
    for _ in range(3000):
        form, tags = rng.choice([name for name in FORM_NAMES if name]), rng.choice((None, "think"))
        text = random_text(rng, form)
        letters = letters_of_content(parser(form, tags), text)
        stream = Tokens(rng, text)
        writers = [i for i, one in enumerate(stream.tokens) if set(letters) & set(range(one.start, one.end))]
        told = []
        for piece in stream.read(parser(form, tags)):
            if piece.kind != "content":
                assert piece.logprobs is None
                continue
            assert piece.logprobs is not None
            own, letters = set(letters[: len(piece.text)]), letters[len(piece.text) :]
            ids = [one["id"] for one in piece.logprobs if stream.writes(one["id"])]
            assert all(own & set(range(stream.tokens[i].start, stream.tokens[i].end)) for i in ids)
            told += ids
        assert told == writers
        num_told += len(told)
        num_hidden += sum(map(stream.writes, range(len(stream.tokens)))) - len(told)
    assert num_told > 5000 and num_hidden > 5000
