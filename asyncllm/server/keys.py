"""API keys: read once, kept as digests, compared in constant time.

Any thread. It never knows requests; a key that has been read is nowhere kept as text.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

import msgspec

MIN_KEY_CHARS = 8
_PEPPER = secrets.token_bytes(32)  # of this process: a digest in a core dump is worth nothing elsewhere


class ApiKey(msgspec.Struct, frozen=True):
    """Who may ask: a name for queues and metrics, and the key's digest."""

    name: str
    digest: bytes


def read_keys(lines: Iterable[str]) -> tuple[ApiKey, ...]:
    """Keys from lines of `KEY` or `NAME KEY`; empty lines and those behind # say nothing.

    Raises:
        ValueError: a line that is neither, by its number and never by its words; a name or a key given twice.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or len(words[-1]) < MIN_KEY_CHARS:
            raise ValueError(f"API key {number}: not KEY or NAME KEY, the key of at least {MIN_KEY_CHARS} characters")
        keys.append(ApiKey(words[0] if len(words) == 2 else f"key{number}", _digest(words[-1].encode())))
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ValueError(f"two API keys have the same {'name' if what == 'name' else 'text'}")
    return tuple(keys)


def find_key(keys: tuple[ApiKey, ...], offered: bytes) -> ApiKey | None:
    """The key that was offered; the time it takes tells nothing of how much of it was right, or which it was."""
    digest = _digest(offered)
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _digest(key: bytes) -> bytes:
    return hmac.digest(_PEPPER, key, hashlib.sha256)
