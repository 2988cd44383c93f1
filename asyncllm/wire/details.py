"""What an answer tells beside its text, put into replies and events that are made already.

Any thread. It never knows tokenizers, the engine or sockets.

Every choice of every reply and event says `"logprobs":null` once, and no text can: inside a JSON string the quotes
are escaped. So the details go in there, whoever made the bytes, and an answer without details pays nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from ..types import Logprob

_PLACE = b'"logprobs":null'
_CHOICES = b'"choices":['


class Token:
    """One token as OpenAI's forms name it, and its bytes where they are wanted."""

    __slots__ = ("bytes", "text")

    def __init__(self, text: str, spelled: bytes) -> None:
        self.text = text
        self.bytes = list(spelled)


Spelled = Sequence[tuple[Token, float]]


class Position:
    """One position: its token, and the likeliest in its place, each with its log probability."""

    __slots__ = ("logprob", "offset", "token", "top")

    def __init__(self, token: Token, logprob: float | None, top: Spelled, offset: int) -> None:
        self.token = token
        self.logprob = logprob  # None: nothing stands before it
        self.top = top
        self.offset = offset  # of the token's text


def chat_logprobs(positions: Sequence[Position]) -> dict[str, Any]:
    """As chat.completion has them."""
    return {"content": [_chat_position(position) for position in positions], "refusal": None}


def completion_logprobs(positions: Sequence[Position]) -> dict[str, Any]:
    """As text_completion has them. The token itself is always among the top ones, with the very same number."""
    return {
        "tokens": [position.token.text for position in positions],
        "token_logprobs": [position.logprob for position in positions],
        "top_logprobs": [_by_text(position) for position in positions],
        "text_offset": [position.offset for position in positions],
    }


def prompt_logprobs(entries: Iterable[Logprob], names: Any) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each token of the prompt but the first, by id."""
    told: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        if all(token_id != entry.token_id for token_id, _, _ in ranked):
            ranked.append((entry.token_id, entry.logprob, None))  # type: ignore[arg-type]
        told.append(
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": names(token_id).text}
                for token_id, logprob, rank in ranked
            }
        )
    return told


def put_in(data: bytes, choices: Sequence[dict[str, Any]]) -> bytes:
    """The bytes with each choice's details, in their order. `logprobs` stays null where it is not among them."""
    pieces = data.split(_PLACE)
    assert len(pieces) > len(choices), "a choice has no place for its details"
    told = [_fields(details) for details in choices] + [_PLACE] * (len(pieces) - 1 - len(choices))
    return b"".join([pieces[0], *(part for pair in zip(told, pieces[1:], strict=True) for part in pair)])


def put_beside(data: bytes, fields: dict[str, Any]) -> bytes:
    """The bytes with these fields before the choices, of the first event if there are several."""
    return data.replace(_CHOICES, orjson.dumps(fields)[1:-1] + b"," + _CHOICES, 1) if fields else data


def _fields(details: dict[str, Any]) -> bytes:
    return orjson.dumps({"logprobs": None} | details)[1:-1]


def _chat_position(position: Position) -> dict[str, Any]:
    top = [_chat_token(token, logprob) for token, logprob in position.top]
    return _chat_token(position.token, position.logprob) | {"top_logprobs": top}


def _chat_token(token: Token, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": token.bytes}


def _by_text(position: Position) -> dict[str, float] | None:
    if position.logprob is None:
        return None
    # Ids that read the same: the likelier stands. The token itself comes last, so that its own number is there.
    likeliest_last = {token.text: logprob for token, logprob in reversed(position.top)}
    return likeliest_last | {position.token.text: position.logprob}
