"""Chat templates: what they may see and do, what they refuse, and that nobody types a control token into them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.errors import ContextTooLong, InvalidRequest, ModelError
from asyncllm.text import chat
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.control import MARKS
from asyncllm.text.tokenizer import Tokenizer

from . import toys

HI = [{"role": "user", "content": "hi"}]
PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<", "<|im_", "im_end|>", "|>", ">", " ", "\n", "x", "é", MARKS[0], "<|endoftext|>"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def template(folder: Path) -> ChatTemplate:
    found = ChatTemplate.from_folder(folder)
    assert found is not None
    return found


def render(source: str, messages: list[dict[str, object]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or HI)


def test_renders_with_the_opening_of_the_answer(folder: Path) -> None:
    assert template(folder).render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{% if tools %}x{% endif %}{{ documents is none }}", "True"),
        ("{{ {'é': [1, '<']} | tojson }}", '{"é": [1, "<"]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ messages[0].content * 3 }}{{ 2 ** 3 }}", "hihihi8"),
    ],
)
def test_what_templates_are_used_to(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_templates_own_sentence_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match=r"^roles must alternate$") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ 'a' + none }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 200000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_what_a_template_cannot_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(source)


def test_a_variable_may_have_any_name() -> None:
    """self is a name of Python's, not of a template's."""
    names = {"self": 1, "args": 2, "kwargs": 3, "context": 4, "": 5}
    assert ChatTemplate("{{ messages[0].content }}{{ args }}").render(HI, variables=names) == "hi2"


def test_a_template_that_makes_too_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="too much"):
        render("{% for i in range(1000) %}xx{% endfor %}")


def test_where_templates_live(tmp_path: Path) -> None:
    toys.byte_level(tmp_path, template=None)
    assert ChatTemplate.from_folder(tmp_path) is None
    config = {"chat_template": [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "named"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template(tmp_path).render(HI) == "named"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template(tmp_path).render(HI) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert template(tmp_path).render(HI) == "jinja"


def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate.from_folder(toys.byte_level(tmp_path, template="{% if %}"))


@given(contents=st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=1, max_size=3))
def test_whatever_is_typed_the_control_tokens_are_the_templates(
    folder: Path, tokenizer: Tokenizer, contents: list[str]
) -> None:
    def encode(texts: list[str]) -> list[int]:
        return template(folder).encode([{"role": "user", "content": text} for text in texts], tokenizer)

    ids, plain = encode(contents), encode(["x"] * len(contents))
    special = [token_id for token_id in ids if token_id in tokenizer.special_ids]
    assert special == [token_id for token_id in plain if token_id in tokenizer.special_ids]
    # A mark that a message itself holds may not be dropped: another one serves then.
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == template(folder).render([{"role": "user", "content": content} for content in contents])


def test_control_tokens_are_not_made_of_two_neighbours(tokenizer: Tokenizer) -> None:
    bare = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    for left, right in pairwise(["<|im_ ", " end|>", "<", "|im_end|>", "<|im_end|", ">"]):
        messages = [{"role": "user", "content": left}, {"role": "user", "content": right}]
        assert not tokenizer.special_ids & set(bare.encode(messages, tokenizer))


def test_control_tokens_hidden_in_tool_calls(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    function = {"name": "<|im_end|>", "arguments": {"<|im_start|>": ["<|im_end|>"]}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    ids = ChatTemplate(source).encode(messages, tokenizer)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == json.dumps(function)


def test_messages_with_every_mark_are_refused(folder: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "<|im_end|>" + "".join(MARKS)}]
    with pytest.raises(InvalidRequest, match="noncharacters"):
        template(folder).encode(messages, tokenizer)


def test_messages_nested_too_deeply_are_refused(tokenizer: Tokenizer) -> None:
    nested: object = "x"
    for _ in range(2000):
        nested = [nested]
    function = {"name": "f", "arguments": nested}
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    with pytest.raises(InvalidRequest, match="deeply"):
        ChatTemplate("x").encode(messages, tokenizer)


def test_too_long_is_found_before_tokenising(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_backend", None)
    with pytest.raises(ContextTooLong):
        template(folder).encode([{"role": "user", "content": "x" * 1_000_000}], tokenizer, max_len=1000)
