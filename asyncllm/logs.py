"""One record, one line: what came from outside cannot write lines, colours or directions of its own.

Any thread. It never knows who logs.
"""

import logging
import re

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Control characters, DEL, C1, line and paragraph separators, and what turns the direction of text around.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class OneLine(logging.Formatter):
    """Escapes what a message holds. A traceback of ours keeps its lines, each with its own escapes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))  # type: ignore[arg-type]


def escaped(text: str) -> str:
    """The text with everything a terminal or a log reader could obey as an escape sequence."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def set_up(level: str) -> None:
    """To stderr, in one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
