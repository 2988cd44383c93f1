"""Detokenising by table against the library, on tokenizers built as Qwen3's, Llama 3's, SmolLM2's and Gemma's are.

The families differ in how text is split, normalised and spelled; the ones here are trained in milliseconds on a few
lines. The real ones take the same tests: `ASYNCLLM_TOKENIZERS=folder:folder pytest tests/text/test_families.py`.
"""

import json
import os
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from asyncllm.text.detokenizer import TableDetokenizer
from asyncllm.text.tokenizer import Tokenizer

from . import toys
from .test_detokenizer import joined, stream_text

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
LLAMA = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "中文标记")  # written as text, the last in no byte alphabet
ALPHABETS = (
    "abc XYZ 0123456789 .,;'s\n\t", "😀🏳️‍🌈👩‍👩‍👧🤷🏽‍♂️", "ďábelské ódy naïve", "абвгд ёж", "삼겹살 한국어", "ภาษาไทย",
    "日本語 中文标记", "हिन्दी العربية עברית", "\u200d\ufe0f\u0301\u1100\u00a0\u2028", "   \n\n\n\t\t  ", "𝔘𝔫𝔦 𐍈",
    "<think></think>",
)  # fmt: skip


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, *, nfc: bool = False) -> Backend:
    backend = Backend(models.BPE(ignore_merges=not nfc))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*toys.CORPUS, *ALPHABETS] * 3, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return backend


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


def smollm() -> Backend:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return byte_level(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def gemma() -> Backend:
    """U+2581 for a space and none in front; bytes for what the vocabulary lacks; runs of spaces and lines as tokens."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(toys.CORPUS * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocab = {piece: i for i, piece in enumerate([*pieces, *(piece for piece, _ in learned)])}
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<pad>", "<eos>", "<bos>")])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "▁▁", "▁▁▁", "<table>")])
    return backend


BUILT: dict[str, Callable[[], Backend]] = {
    "qwen3": lambda: byte_level(split(QWEN), nfc=True),
    "llama3": lambda: byte_level(split(LLAMA)),
    "smollm2": smollm,
    "gemma": gemma,
}
REAL = [folder for folder in os.environ.get("ASYNCLLM_TOKENIZERS", "").split(":") if folder]


@pytest.fixture(scope="module", params=[*BUILT, *REAL])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in BUILT:
        return Path(request.param)
    folder = tmp_path_factory.mktemp("family")
    BUILT[request.param]().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Backend:
    return Backend.from_file(str(folder / "tokenizer.json"))


def some_text(draw: random.Random) -> str:
    letters = "".join(draw.sample(ALPHABETS, draw.randrange(1, 4)))
    return "".join(draw.choices(letters, k=draw.randrange(1, 80)))


def test_texts_equal_decode_stream_however_cut(tokenizer: Tokenizer, backend: Backend) -> None:
    draw = random.Random(7)
    assert isinstance(tokenizer.detokenizer(), TableDetokenizer)
    for _ in range(400):
        text = some_text(draw) + "."  # DecodeStream never shows an open tail
        ids = backend.encode(text, add_special_tokens=False).ids
        mine = joined(tokenizer.detokenizer(skip_special_tokens=False), ids, draw.randrange(1, 9))
        assert mine == backend.decode(ids, skip_special_tokens=False)
        assert mine in (text, unicodedata.normalize("NFC", text))
        stream = stream_text(backend, ids)
        assert joined(tokenizer.detokenizer(), ids) == stream


def test_what_has_been_shown_is_never_taken_back(tokenizer: Tokenizer, backend: Backend) -> None:
    """Each piece ends with a whole character, so the shown text is at all times a beginning of the whole."""
    draw = random.Random(11)
    for _ in range(100):
        ids = backend.encode(some_text(draw), add_special_tokens=False).ids
        whole, shown, detokenizer = tokenizer.decode(ids), "", tokenizer.detokenizer()
        for token_id in ids:
            shown += detokenizer.push((token_id,))
            assert whole.startswith(shown)
        assert shown + detokenizer.finish() == whole


@pytest.mark.parametrize("skip", [True, False])
def test_noise_equals_the_librarys_whole_decode(tokenizer: Tokenizer, backend: Backend, skip: bool) -> None:
    draw = random.Random(13)
    # A run of <0x..> that is no UTF-8 is all marks to the library, of whichever bytes; ours marks what is broken.
    ids = [i for text, i in backend.get_vocab().items() if not text.startswith("<0x")]
    whole = [backend.encode(char, add_special_tokens=False).ids for char in "é😀삼𐍈"]
    for _ in range(400):
        kinds = [draw.random() < 0.2 for _ in range(draw.randrange(1, 40))]
        parts = [draw.choice(whole) if is_whole else [draw.choice(ids)] for is_whole in kinds]
        noise = [token_id for part in parts for token_id in part]
        mine = joined(tokenizer.detokenizer(skip_special_tokens=skip), noise, draw.randrange(1, 9))
        assert mine == backend.decode(noise, skip_special_tokens=skip)


def test_broken_bytes_are_marked_and_what_is_whole_is_shown(tokenizer: Tokenizer, backend: Backend) -> None:
    draw = random.Random(17)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 30))]
        spelled = b"".join(tokenizer.spell(token_id) for token_id in ids if token_id not in tokenizer.special_ids)
        assert joined(tokenizer.detokenizer(), ids, draw.randrange(1, 5)) == spelled.decode("utf-8", "replace")
