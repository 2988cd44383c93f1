"""What each token id spells, as bytes: the table behind incremental detokenisation.

Built once at start, read by the loop thread. It never knows requests or templates.
"""

from typing import Any

Spec = dict[str, Any]  # a tokenizer.json, parsed


def token_bytes(spec: Spec, vocab: dict[str, int]) -> list[bytes] | None:
    """The bytes of every id, holes empty; None when this tokenizer's decoder is not one token at a time.

    Two families cover today's models: byte-level BPE (Llama 3, Qwen, SmolLM2) and SentencePiece-like
    vocabularies with byte fallback (Llama 2, Mistral, Gemma). The second family's decoder strips one
    leading space from a whole text; an answer continues its prompt, so here that space is kept.
    """
    steps = _decoder_steps(spec.get("decoder"))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _table(vocab, _byte_level)
    if steps and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and _is_plain(steps):
        return _table(vocab, _Spelling(steps))
    return None


def _decoder_steps(decoder: Spec | None) -> list[Spec]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_plain(steps: list[Spec]) -> bool:
    """Whether each step looks at one token only: string replacements, and a strip of the first space."""
    for step in steps:
        if step["type"] == "Replace" and "String" not in step["pattern"]:
            return False
        if step["type"] == "Strip" and (step["content"], step["stop"]) != (" ", 0):
            return False
    return True


def _table(vocab: dict[str, int], spell: Any) -> list[bytes]:
    table = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        table[token_id] = spell(token)
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


class _Spelling:
    """Spells a SentencePiece-like token: U+2581 is a space, <0x41> the byte 0x41."""

    def __init__(self, steps: list[Spec]) -> None:
        self._replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        self._replacements += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
        has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        self._bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if has_bytes else {}

    def __call__(self, token: str) -> bytes:
        if (byte := self._bytes.get(token)) is not None:
            return byte
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()
