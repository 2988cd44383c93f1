"""Padding for streams that ask for it: the lengths of their events do not tell which tokens are in them.

Any thread; sans-I/O. It never knows sockets. Encryption hides what is said, not how long each piece of it is, and
pieces that are tokens can be guessed by their lengths.
"""

import base64
import os

from .response_events import Framing

# What a token makes of an event is rounded up to a multiple: a token of 100 characters looks like one of none.
BLOCK_BYTES = 256
DETAILED_BLOCK_BYTES = 4096  # with log probabilities, of twenty tokens at most
_DETAILS = b'"logprobs":{', b'"logprobs":[{'
# Where what may vary begins. A mark is in no text: there its quotes would be escaped.
_CHUNK_START = b'"choices":[{'
_DELTA_START = b'"output_index":'


def obfuscated(events: bytes) -> bytes:
    """Chunks of chat or completions, each with its `obfuscation`; other events, as usage and [DONE], as they are."""
    return b"\n\n".join([_chunk(event) for event in events.split(b"\n\n")])


class Obfuscated:
    """A Framing whose deltas have an `obfuscation`. Events that repeat the whole text show how long that is."""

    def __init__(self, framing: Framing) -> None:
        self._framing = framing

    def event(self, kind: bytes, number: int, body: bytes) -> bytes:
        if kind.endswith(b".delta"):
            body += _member(body, body.index(_DELTA_START))
        return self._framing.event(kind, number, body)


def _chunk(event: bytes) -> bytes:
    start = event.find(_CHUNK_START)
    return event if start < 0 else b"%b%b}" % (event[:-1], _member(event, start))


def _member(event: bytes, start: int) -> bytes:
    """What makes the event longer, from `start` on, by just as much as it takes."""
    block = DETAILED_BLOCK_BYTES if any(mark in event for mark in _DETAILS) else BLOCK_BYTES
    num = (start - len(event)) % block
    return b',"obfuscation":"%b"' % base64.b64encode(os.urandom(num))[:num]
