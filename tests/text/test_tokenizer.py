"""Encoding: whose control tokens count, start tokens, the early bound, threads, and what a folder may lack."""

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from asyncllm.errors import ContextTooLong, InvalidRequest, ModelError
from asyncllm.text.tokenizer import Tokenizer

from . import toys


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(toys.byte_level(tmp_path_factory.mktemp("toy")))


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 400
    assert tokenizer.eos_ids == (toys.EOS_ID,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert not tokenizer.start_ids
    assert tokenizer.encode("") == []
    assert "400 ids" in repr(tokenizer)


def test_typed_control_tokens_stay_text(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<|endoftext|>"
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_templates_control_tokens_become_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_rendered("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.encode("user\nhi") == ids[1:-1]


def test_rendered_text_equals_the_librarys_own_encoding(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(toys.byte_level_json())
    text = "<|im_start|>user\n  Ďábel 😀 \n<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_rendered(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("text", ["<s>hello</s>hell", "hello", "<s> hello </s> hello", "hello</s>", "</s>", ""])
def test_pieces_between_control_tokens_are_spaced_as_in_the_library(tmp_path: Path, metaspace: bool, text: str) -> None:
    folder = toys.byte_fallback(tmp_path, metaspace=metaspace)
    tokenizer, backend = Tokenizer.from_folder(folder), Backend.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode_rendered(text) == backend.encode(text, add_special_tokens=False).ids


def test_the_start_token_is_added_to_plain_text_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(toys.byte_fallback(tmp_path, metaspace=False))
    assert tokenizer.start_ids
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("hell")[0] == 1
    assert tokenizer.encode_rendered("<s>hell").count(1) == 1
    assert tokenizer.eos_ids == (2, 0)


def test_white_space_that_belongs_to_a_control_token(tmp_path: Path) -> None:
    added = json.loads(toys.byte_level_json())["added_tokens"]
    added[2] |= {"lstrip": True, "rstrip": True}
    text = toys.edited(added_tokens=added)
    tokenizer = Tokenizer.from_folder(toys.byte_level(tmp_path, tokenizer_json=text))
    rendered = "dog \n <|im_end|> \n fox<|im_start|> dog"
    assert tokenizer.encode_rendered(rendered) == Backend.from_str(text).encode(rendered).ids


def test_unflagged_control_tokens_are_known_by_their_bars(tmp_path: Path) -> None:
    """DeepSeek's role marks carry no flag; <think> is text that an assistant message may bring back."""
    added = json.loads(toys.byte_level_json())["added_tokens"]
    extra = [
        added[0] | {"id": 400 + i, "content": content, "special": False}
        for i, content in enumerate(["<\uff5cUser\uff5c>", "<|tool|>", "<think>"])
    ]
    text = toys.edited(added_tokens=added + extra)
    tokenizer = Tokenizer.from_folder(toys.byte_level(tmp_path, tokenizer_json=text))
    typed = tokenizer.encode("<\uff5cUser\uff5c><|tool|><think>")
    assert [token_id for token_id in typed if token_id >= 400] == [402]
    assert tokenizer.encode_rendered("<\uff5cUser\uff5c><|tool|>") == [400, 401]
    assert tokenizer.decode([400, 401, 402]) == "<\uff5cUser\uff5c><|tool|><think>"


def test_too_long_is_refused_with_the_count(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextTooLong, match=r"^This model's maximum context length is 10 tokens.* has 12\."):
        tokenizer.encode("0a" * 6, max_len=10)
    with pytest.raises(ContextTooLong):
        tokenizer.encode_rendered("<|im_start|>" + "0a" * 5, max_len=10)
    assert len(tokenizer.encode("0a" * 5, max_len=10)) == 10


def test_half_a_surrogate_pair_is_the_callers_fault(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("a\ud800")


def test_a_hopeless_prompt_is_refused_without_tokenising(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_backend", None)
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(ContextTooLong, match="at least"):
            encode("x" * 1_000_000, max_len=1000)


def test_the_bound_is_a_bound(tokenizer: Tokenizer) -> None:
    for text in ("", "a", *toys.CORPUS, "<|endoftext|>" * 10, " " * 100):
        assert tokenizer.num_tokens_at_least(len(text)) <= len(tokenizer.encode(text))


def test_no_bound_where_a_normalizer_may_shrink_text(tmp_path: Path) -> None:
    text = toys.edited(normalizer={"type": "Strip", "strip_left": True, "strip_right": True})
    tokenizer = Tokenizer.from_folder(toys.byte_level(tmp_path, tokenizer_json=text))
    assert tokenizer.num_tokens_at_least(10**9) == 0


def test_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    texts = [text * 50 for text in toys.CORPUS]
    expected = [tokenizer.encode(text) for text in texts]
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                wrong.extend(1 for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text) != ids)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_eos_comes_from_generation_config_first(tmp_path: Path) -> None:
    toys.byte_level(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (5, 6)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_file_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
