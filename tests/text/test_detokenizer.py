"""Incremental detokenisation against the library's own, on texts, on noise, however the ids are cut."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from asyncllm import hub
from asyncllm.text.detokenizer import MAX_HELD_TOKENS, Detokenizer, TableDetokenizer
from asyncllm.text.tokenizer import Tokenizer

from . import toys

TEXTS = st.text(
    st.one_of(
        st.sampled_from("😀🏳️‍🌈👩‍👩‍👧ďábelské삼겹살ภาษา\u200d\ufffd \n\t"), st.characters(exclude_categories=["Cs"])
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def joined(detokenizer: Detokenizer, ids: list[int], cut: int = 1) -> str:
    """Single ids as they come one a step, which have a way of their own."""
    groups = [ids[i : i + cut] for i in range(0, len(ids), cut)]
    parts = [detokenizer.push_one(*group) if len(group) == 1 else detokenizer.push(group) for group in groups]
    return "".join(parts) + detokenizer.finish()


def stream_text(backend: Backend, ids: list[int]) -> str:
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(backend, token_id) or "" for token_id in ids)


@given(text=TEXTS, cut=st.integers(1, 5))
def test_any_text_comes_back_however_cut(tokenizer: Tokenizer, text: str, cut: int) -> None:
    assert joined(tokenizer.detokenizer(), tokenizer.encode(text), cut) == text


@given(text=TEXTS)
def test_whole_text_equals_decode_stream(tokenizer: Tokenizer, folder: Path, text: str) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    whole = text + "."  # DecodeStream never shows an open tail
    assert joined(tokenizer.detokenizer(), tokenizer.encode(whole)) == stream_text(backend, tokenizer.encode(whole))


@given(ids=st.lists(st.integers(0, 399), max_size=40), cut=st.integers(1, 7), skip=st.booleans())
def test_noise_equals_the_librarys_whole_decode(
    tokenizer: Tokenizer, folder: Path, ids: list[int], cut: int, skip: bool
) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert joined(tokenizer.detokenizer(skip_special_tokens=skip), ids, cut) == expected


@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_no_piece_ends_in_half_a_character_and_little_is_held(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, TableDetokenizer)
    for token_id in ids:
        detokenizer.push((token_id,)).encode()
        assert len(detokenizer._tail) <= 3


def test_a_tail_inside_a_character_is_one_replacement_mark_at_the_end(tokenizer: Tokenizer) -> None:
    emoji = tokenizer.encode("😀")
    assert len(emoji) > 1
    for cut in range(1, len(emoji)):
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.push(emoji[:cut]) == ""
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == ""


def test_endless_broken_bytes_are_not_held_back(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("😀")[0]
    text = joined(tokenizer.detokenizer(), [first] * 50)
    assert text == "\ufffd" * 50


def test_an_id_beyond_the_vocabulary_spells_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("dog")
    assert joined(tokenizer.detokenizer(), [*ids, 400, 10**6, *ids]) == "dogdog"


def test_special_tokens_hide_themselves_only(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("é"), 2]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>é<|im_end|>"


@pytest.mark.parametrize("metaspace", [False, True])
def test_byte_fallback_keeps_the_first_space_of_an_answer(tmp_path: Path, metaspace: bool) -> None:
    tokenizer = Tokenizer.from_folder(toys.byte_fallback(tmp_path, metaspace=metaspace))
    ids = tokenizer.encode("hello é😀 hell")
    assert ids[0] == 1
    assert joined(tokenizer.detokenizer(), ids) == " hello é😀 hell"
    byte_of_emoji = tokenizer.encode("😀")[-4:]
    assert joined(tokenizer.detokenizer(), [*byte_of_emoji[:2], *ids[1:2]]) == "\ufffd hell"


def test_a_decoder_without_a_table_goes_through_the_librarys_stream(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(toys.word_piece(tmp_path))
    ids = tokenizer.encode("hello world !")
    assert joined(tokenizer.detokenizer(), [1, *ids]) == "hello world!"
    assert joined(tokenizer.detokenizer(skip_special_tokens=False), [*ids, 1]) == "hello world! [CLS]"


def test_the_librarys_stream_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    byte_fallback = toys.byte_fallback(tmp_path, metaspace=False)
    tokenizer = Tokenizer.from_folder(byte_fallback)
    tokenizer._table = None
    byte = tokenizer.encode("😀")[-4]
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push((byte,)) for _ in range(3 * MAX_HELD_TOKENS)]
    assert sum(map(len, pieces)) >= 2 * MAX_HELD_TOKENS
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.default_model
def test_on_the_default_model_against_decode_stream() -> None:
    folder = hub.resolve(None)
    tokenizer, backend = Tokenizer.from_folder(folder), Backend.from_file(str(folder / "tokenizer.json"))
    draw = random.Random(7)
    letters = "abc XYZ 0123456789 .,;\n\t😀👩‍👩‍👧ďáбвг삼겹ภาษา日本"
    for _ in range(500):
        text = "".join(draw.choices(letters, k=draw.randrange(1, 60))) + "."
        ids = tokenizer.encode(text)
        assert joined(tokenizer.detokenizer(), ids) == stream_text(backend, ids) == text
    for _ in range(500):
        noise = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 40))]
        assert joined(tokenizer.detokenizer(), noise) == backend.decode(noise)
