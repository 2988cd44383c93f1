"""Sampling and scoring over HTTP, on a real tiny model: what a field asks for is seen in the answer."""

import asyncio
import json
import time
import typing
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types import completion_create_params as text_types
from openai.types.chat import completion_create_params as chat_types

import asyncllm
from asyncllm import build
from asyncllm import config as configs
from asyncllm.client import AsyncClient
from asyncllm.errors import InvalidRequest
from asyncllm.llm import AsyncLLM
from asyncllm.server.app import listening
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import SamplingParams
from tests.fakes import until
from tests.server.conftest import Serve, endless
from tests.tiny import make_checkpoint

PROMPT = "The quick brown fox"
HI: list[Any] = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", "float32", seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[tuple[AsyncLLM, AsyncOpenAI]]:
    config = configs.make(model=str(folder), device="cpu", threads=1, max_model_len=256, served_model_name="tiny")
    async with (
        build.serving(config) as llm,
        listening(llm, port=0) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield llm, client


async def complete(client: AsyncOpenAI, **fields: Any) -> Any:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields
    extra = fields.pop("extra", {}) | {name: fields.pop(name) for name in list(fields) if name not in OPENAI}
    return await client.completions.create(model="tiny", extra_body=extra, **fields)


async def chat(client: AsyncOpenAI, **fields: Any) -> Any:
    fields = {"messages": HI, "max_tokens": 8, "temperature": 0} | fields
    extra = fields.pop("extra", {}) | {name: fields.pop(name) for name in list(fields) if name not in OPENAI}
    return await client.chat.completions.create(model="tiny", extra_body=extra, **fields)


OPENAI = frozenset((
    "prompt", "messages", "max_tokens", "temperature", "n", "best_of", "logprobs", "top_logprobs", "logit_bias", "echo",
    "presence_penalty", "frequency_penalty", "seed", "stop", "stream", "stream_options", "top_p",
))  # fmt: skip


async def refused(call: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await call
    assert caught.value.param == param


async def joined(stream: Any) -> tuple[list[str], list[list[Any]], list[Any]]:
    """Of a stream, by choice: texts, logprobs' positions; and every chunk."""
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if (told := choice.logprobs) is not None:
                columns = zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True) if (
                    hasattr(told, "tokens")) else told.content  # fmt: skip
                logprobs.setdefault(choice.index, []).extend(columns)
    return [texts[i] for i in sorted(texts)], [logprobs.get(i, []) for i in sorted(texts)], chunks


# -- choices --


async def test_SAMP_1_n_choices_each_with_its_own(served: Any) -> None:
    _, client = served
    for route in (complete, chat):
        whole = await route(client, n=5, temperature=1, seed=11, logprobs=1 if route is complete else True)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4]
        alone = await route(client, n=1, temperature=1, seed=11)
        texts = [choice.text if route is complete else choice.message.content for choice in whole.choices]
        assert texts[0] == (alone.choices[0].text if route is complete else alone.choices[0].message.content)
        assert len(set(texts)) > 1
        assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
        lengths = [len(c.logprobs.tokens if route is complete else c.logprobs.content) for c in whole.choices]
        assert whole.usage.completion_tokens == sum(lengths)
        stream = await route(client, n=5, temperature=1, seed=11, stream=True, stream_options={"include_usage": True})
        streamed, _, chunks = await joined(stream)
        assert streamed == texts and chunks[-1].usage == whole.usage
    greedy = await complete(client, n=3)
    assert len({choice.text for choice in greedy.choices}) == 1


async def test_openais_helper_follows_choices_that_begin_at_different_times(served: Any) -> None:
    """Choices open in their order, whichever speaks first; each says its role once."""
    _, client = served
    for extra in ({}, {"logprobs": True}):
        async with client.chat.completions.stream(
            model="tiny", messages=HI, n=4, temperature=1.5, seed=3, max_tokens=9, **extra
        ) as stream:
            async for _ in stream:
                pass
            final = stream.current_completion_snapshot
        whole = await chat(client, n=4, temperature=1.5, seed=3, max_tokens=9, **extra)
        assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
        assert {c.message.role for c in final.choices} == {"assistant"}
        for mine, theirs in zip(final.choices, whole.choices, strict=True):
            positions = [[p.token for p in c.logprobs.content] if c.logprobs else [] for c in (mine, theirs)]
            assert positions[0] == positions[1] and bool(positions[0]) == bool(extra)


async def test_logprobs_are_of_the_tokens_that_count(served: Any) -> None:
    """A stop string drops the text behind it and nothing of what was drawn for it."""
    _, client = served
    text = text_of(await chat(client, max_tokens=20))
    for stop in (text[3:5], text[-2:]):
        told = await chat(client, max_tokens=20, stop=stop, logprobs=True, return_token_ids=True)
        choice = told.choices[0]
        assert len(choice.logprobs.content) == len(choice.token_ids) == told.usage.completion_tokens
        _, [positions], _ = await joined(await chat(client, max_tokens=20, stop=stop, logprobs=True, stream=True))
        assert positions == choice.logprobs.content


async def test_n_and_a_list_of_prompts(served: Any) -> None:
    _, client = served
    several = await complete(client, prompt=[PROMPT, "One two", "three"], n=2, temperature=1, seed=5)
    assert [choice.index for choice in several.choices] == list(range(6))
    for i, prompt in enumerate((PROMPT, "One two", "three")):
        own = await complete(client, prompt=prompt, n=2, temperature=1, seed=5)
        assert [c.text for c in own.choices] == [c.text for c in several.choices[2 * i : 2 * i + 2]]


async def test_SAMP_2_a_huge_n_is_refused_at_once(served: Any) -> None:
    _, client = served
    for value in (0, -1, 129, 100_000, 10**18):
        for route in (complete, chat):
            await refused(route(client, n=value), "n")
        await refused(complete(client, best_of=value), "best_of")
    await refused(complete(client, n=3, best_of=2), "best_of")
    await refused(complete(client, prompt=["x"] * 64, n=128), "n")
    for wrong in (1.5, "2", True):
        await refused(complete(client, n=wrong), "n")


async def test_best_of_gives_the_likeliest(served: Any) -> None:
    _, client = served
    drawn = await complete(client, n=6, temperature=1.0, seed=2, logprobs=0)

    def mean(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    ranked = sorted(drawn.choices, key=mean, reverse=True)
    told = await complete(client, n=2, best_of=6, temperature=1.0, seed=2)
    assert [choice.text for choice in told.choices] == [choice.text for choice in ranked[:2]]
    assert all(choice.logprobs is None for choice in told.choices)
    await refused(complete(client, best_of=2, stream=True), "best_of")


# -- what may be drawn --


async def test_what_changes_the_logits(served: Any, tokenizer: Tokenizer) -> None:
    llm, client = served
    plain = (await complete(client)).choices[0].text
    [token] = tokenizer.encode("e")
    assert (await complete(client, logit_bias={str(token): 100})).choices[0].text == "e" * 8
    allowed = tokenizer.encode("abc")
    assert set((await complete(client, allowed_token_ids=allowed)).choices[0].text) <= set(tokenizer.decode(allowed))
    few: dict[str, Any] = {"allowed_token_ids": list(range(30, 60)), "max_tokens": 60}
    repeating = (await complete(client, **few)).choices[0].text
    for field in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 3}):
        assert (await complete(client, **few, **field)).choices[0].text != repeating
    ids = (await complete(client, return_token_ids=True)).choices[0].token_ids
    word = tokenizer.decode(ids[2:4])
    without = (await complete(client, bad_words=[word])).choices[0]
    assert without.text != plain and word not in without.text
    assert (await complete(client, bad_words=["no such words here"])).choices[0].text == plain


async def test_what_is_out_of_range_is_named(served: Any) -> None:
    llm, client = served
    size = llm.limits.vocab_size
    for fields, param in (
        ({"presence_penalty": 2.5}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 10**9}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {str(size): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"), ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3, size]}, "allowed_token_ids[1]"), ({"bad_words": [""]}, "bad_words[0]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"timeout": 0}, "timeout"), ({"timeout": -1}, "timeout"), ({"priority": 2**40}, "priority"),
        ({"cache_salt": "x" * 300}, "cache_salt"), ({"request_id": "\n"}, "request_id"),
    ):  # fmt: skip
        await refused(complete(client, **fields), param)
        await refused(chat(client, **fields), param)
    for value in (-1, 21, 10**6):
        await refused(complete(client, logprobs=value), "logprobs")
        await refused(chat(client, logprobs=True, top_logprobs=value), "top_logprobs")
    await refused(chat(client, top_logprobs=3), "top_logprobs")
    await refused(complete(client, logprobs=True), "logprobs")


async def test_STOP_4_a_stop_on_the_very_first_token(served: Any, tokenizer: Tokenizer) -> None:
    _, client = served
    [token] = tokenizer.encode("e")
    forced: dict[str, Any] = {"logit_bias": {str(token): 100}, "stop": ["e"], "n": 2, "max_tokens": 9}
    for route in (complete, chat):
        for include in (False, True):
            told = await route(client, include_stop_str_in_output=include, **forced)
            texts = [c.text if route is complete else c.message.content for c in told.choices]
            assert texts == ["e" if include else ""] * 2
            assert {c.finish_reason for c in told.choices} == {"stop"} and told.usage.completion_tokens == 2
            streamed, _, chunks = await joined(
                await route(client, include_stop_str_in_output=include, stream=True, **forced)
            )
            assert streamed == texts
            ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
            assert ends == ["stop", "stop"]


async def test_UTF_3_an_answer_that_ends_inside_a_character(served: Any, tokenizer: Tokenizer) -> None:
    """One U+FFFD for what is begun, streamed or not; the whole character once all of it is drawn."""
    _, client = served
    pieces = tokenizer.encode("\U0001f600")
    assert len(pieces) > 1
    first = {"logit_bias": {str(pieces[0]): 100}}
    for count in (1, 2, 5):
        told = await complete(client, max_tokens=count, **first)
        assert told.choices[0].finish_reason == "length" and told.usage.completion_tokens == count
        assert set(told.choices[0].text) == {"\ufffd"}
        texts, _, _ = await joined(await complete(client, max_tokens=count, stream=True, **first))
        assert texts == [told.choices[0].text]


async def test_SAMP_5_numbers_beyond_the_vocabulary_or_the_machine(served: Any) -> None:
    """Refused by name or harmless, with neighbours streaming all the while."""
    llm, client = served
    solo = text_of(await complete(client, max_tokens=100))
    neighbours = [asyncio.create_task(complete(client, max_tokens=100)) for _ in range(4)]
    size = llm.limits.vocab_size
    for top_k in (0, -1, 1, size, size + 1, 2**31, 2**62):
        assert (await complete(client, top_k=top_k, temperature=1, max_tokens=2)).usage.completion_tokens == 2
    for fields, param in (
        ({"top_k": -2}, "top_k"), ({"top_k": 10**30}, "top_k"), ({"seed": 2**63}, "seed"), ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"), ({"seed": "100"}, "seed"), ({"seed": 1.5}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": -3}, "presence_penalty"),
        ({"frequency_penalty": 10**9}, "frequency_penalty"),
    ):  # fmt: skip
        await refused(complete(client, extra=fields), param)
    assert [text_of(await one) for one in neighbours] == [solo] * 4


# -- log probabilities --


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 1}, {"top_p": 0.01}, {"logit_bias": {str(i): -100 for i in range(300)}}, {"temperature": 0.01},
     {"allowed_token_ids": [80]}],
)  # fmt: skip
async def test_SAMP_3_logprobs_are_finite_sorted_and_the_same_streamed(served: Any, fields: Any) -> None:
    _, client = served
    fields = {"temperature": 1, "seed": 4, "top_logprobs": 5, "logprobs": True} | fields
    whole = await chat(client, **fields)
    positions = whole.choices[0].logprobs.content
    strict(whole.model_dump_json())
    assert len(positions) == whole.usage.completion_tokens
    for position in positions:
        values = [top.logprob for top in position.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert all(-9999 <= value <= 0 for value in [*values, position.logprob])
        assert all(isinstance(top.bytes, list) for top in [position, *position.top_logprobs])
    if "allowed_token_ids" not in fields:
        text = bytes([byte for position in positions for byte in position.bytes]).decode(errors="replace")
        assert whole.choices[0].message.content in text  # special tokens have bytes and are not shown
    texts, [streamed], _ = await joined(await chat(client, stream=True, **fields))
    assert texts == [whole.choices[0].message.content] and streamed == positions


async def test_responses_tell_logprobs_in_deltas_parts_and_whole(served: Any) -> None:
    _, client = served
    fields: Any = {"model": "tiny", "input": HI, "max_output_tokens": 12, "temperature": 0, "top_logprobs": 2}
    fields["include"] = ["message.output_text.logprobs"]
    expected = (await chat(client, logprobs=True, top_logprobs=2, max_tokens=12)).choices[0].logprobs.content
    whole = await client.responses.create(**fields)
    told = whole.output[0].content[0].logprobs
    assert [one.model_dump() for one in told] == [one.model_dump() for one in expected]
    events = [event async for event in await client.responses.create(**fields, stream=True)]
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [(one.token, one.logprob) for one in deltas] == [(one.token, one.logprob) for one in told]
    assert events[-1].response.output[0].content == whole.output[0].content
    plain = await client.responses.create(**fields | {"include": [], "top_logprobs": 0})
    assert plain.output[0].content[0].logprobs == []


async def test_completions_logprobs_name_the_token_itself_and_where_it_stands(served: Any) -> None:
    _, client = served
    for wide in (0, 3):
        whole = await complete(client, logprobs=wide, temperature=1, seed=9, max_tokens=20)
        told = whole.choices[0].logprobs
        assert len(told.tokens) == whole.usage.completion_tokens
        for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert top[token] == logprob and wide <= len(top) <= wide + 1 or wide == 0
        text = whole.choices[0].text
        before = ""
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            is_broken = "bytes:" in before + token or token.startswith("<|")  # half a character: told with the next
            assert is_broken or text[offset : offset + len(token)] == token
            before = token
        _, [streamed], _ = await joined(await complete(client, logprobs=wide, temperature=1, seed=9, max_tokens=20,
                                                       stream=True))  # fmt: skip
        assert streamed == list(zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True))


async def test_tokens_may_be_told_as_ids(served: Any) -> None:
    _, client = served
    told = await complete(client, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)
    ids = told.choices[0].token_ids
    assert told.choices[0].logprobs.tokens == [f"token_id:{i}" for i in ids]
    told = await chat(client, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    assert [p.token for p in told.choices[0].logprobs.content] == [f"token_id:{i}" for i in told.choices[0].token_ids]
    assert told.prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_back_and_go_in(served: Any, stream: bool) -> None:
    _, client = served
    first = await complete(client, return_token_ids=True)
    prompt_ids, ids = first.choices[0].prompt_token_ids, first.choices[0].token_ids
    again = await complete(client, prompt=prompt_ids, return_token_ids=True, stream=stream)
    chunks = [chunk async for chunk in again] if stream else [again]
    assert [i for chunk in chunks for c in chunk.choices for i in c.token_ids] == ids
    assert chunks[0].choices[0].prompt_token_ids == prompt_ids


# -- scoring --


async def test_echo_scores_a_prompt_as_lm_eval_asks(served: Any, tokenizer: Tokenizer) -> None:
    """Each token of context and continuation, bit for bit as when it was drawn; prompt + 1 entries."""
    _, client = served
    prompts = [tokenizer.encode("The dog does not mind."), tokenizer.encode("It was the best of times")]
    told = await complete(client, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    for choice, prompt in zip(sorted(told.choices, key=lambda choice: choice.index), prompts, strict=True):
        scores = choice.logprobs
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(prompt) + 1
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        for token, own, top in list(zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True))[1:]:
            assert top[token] == own <= max(top.values())
        assert scores.text_offset[0] == 0 and choice.text.startswith(tokenizer.decode(prompt))
        assert choice.text[scores.text_offset[-1] :] == tokenizer.decode([*tokenizer.encode(scores.tokens[-1])])
        assert max(scores.top_logprobs[-1].values()) == scores.token_logprobs[-1]
    assert told.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_output_is_the_prompt(served: Any, tokenizer: Tokenizer, stream: bool) -> None:
    _, client = served
    length = len(tokenizer.encode(PROMPT))
    for logprobs in (None, 2):
        fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": logprobs, "stream": stream}
        if stream:
            texts, [positions], chunks = await joined(
                await complete(client, stream_options={"include_usage": True}, **fields)
            )
            assert chunks[-1].usage.completion_tokens == 0 and chunks[-2].choices[0].finish_reason == "length"
        else:
            told = await complete(client, **fields)
            texts, positions = [told.choices[0].text], told.choices[0].logprobs and told.choices[0].logprobs.tokens
            assert told.usage.completion_tokens == 0 and told.choices[0].finish_reason == "length"
        assert texts == [PROMPT] and len(positions or ()) == (length if logprobs else 0)
    await refused(complete(client, max_tokens=0), "max_tokens")


async def test_echo_with_output_and_prompt_logprobs(served: Any, tokenizer: Tokenizer) -> None:
    _, client = served
    plain = (await complete(client)).choices[0].text
    assert (await complete(client, echo=True)).choices[0].text == PROMPT + plain
    told = (await complete(client, prompt_logprobs=2)).choices[0]
    ids = tokenizer.encode(PROMPT)
    assert told.text == plain and told.logprobs is None and told.prompt_logprobs[0] is None
    assert len(told.prompt_logprobs) == len(ids)
    for token_id, entry in zip(ids[1:], told.prompt_logprobs[1:], strict=True):
        assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id]) and 2 <= len(entry) <= 3
    whole = await chat(client, prompt_logprobs=0, n=2, return_token_ids=True)
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids) > 1
    chunks = [chunk async for chunk in await chat(client, prompt_logprobs=0, n=2, return_token_ids=True, stream=True)]
    [prompt_ids] = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    [scores] = [chunk.prompt_logprobs for chunk in chunks if hasattr(chunk, "prompt_logprobs")]
    assert (prompt_ids, len(scores)) == (whole.prompt_token_ids, len(whole.prompt_logprobs))


async def test_every_choice_echoes_its_prompt_however_late_it_begins(served: Any) -> None:
    _, client = served
    prompts = ["One two", PROMPT * 9, "three"]
    fields: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1, "n": 2, "temperature": 1, "seed": 4}
    whole = await complete(client, **fields)
    texts, positions, _ = await joined(await complete(client, stream=True, **fields))
    assert texts == [choice.text for choice in whole.choices]
    assert [len(one) for one in positions] == [len(choice.logprobs.tokens) for choice in whole.choices]
    assert [one[0][1] for one in positions] == [None] * 6


# -- the rest --


async def test_a_stop_may_be_shown(served: Any) -> None:
    _, client = served
    text = (await complete(client, max_tokens=20)).choices[0].text
    stop = text[6:9]
    for stream in (False, True):
        for include in (False, True):
            told = await complete(
                client, max_tokens=20, stop=stop, include_stop_str_in_output=include, stream=stream
            )  # fmt: skip
            got = (await joined(told))[0][0] if stream else told.choices[0].text
            assert got == text[: text.index(stop) + (len(stop) if include else 0)]
    ids = (await complete(client, max_tokens=20, return_token_ids=True)).choices[0].token_ids
    hidden, shown = [(await complete(client, stop_token_ids=[ids[3]], include_stop_str_in_output=include)).choices[0]
                     for include in (False, True)]  # fmt: skip
    assert shown.text.startswith(hidden.text) and len(shown.text) > len(hidden.text)


async def test_the_last_message_is_continued(served: Any, tokenizer: Tokenizer) -> None:
    llm, client = served
    messages = [*HI, {"role": "assistant", "content": "The answer is "}]
    told = await chat(client, messages=messages, continue_final_message=True, return_token_ids=True)
    ids = told.prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\nThe answer is ")
    closed = await chat(client, messages=messages, add_generation_prompt=False, return_token_ids=True)
    text = tokenizer.decode(closed.prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("The answer is <|im_end|>\n")
    for fields in ({"messages": HI}, {"messages": messages, "add_generation_prompt": True}):
        await refused(chat(client, continue_final_message=True, **fields), "continue_final_message")


async def test_ids_priorities_salts_and_timeouts(served: Any) -> None:
    _, client = served
    told = await complete(client, request_id="mine-7", priority=3, cache_salt="s", timeout=60)
    assert told.id == "cmpl-mine-7"
    assert (await chat(client, request_id="mine-7")).id == "chatcmpl-mine-7"
    raw = await client.completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "theirs"}
    )
    assert raw.headers["x-request-id"] == "theirs"
    long = await complete(client, prompt=PROMPT * 12, cache_salt="a", max_tokens=1)
    assert long.usage.prompt_tokens_details.cached_tokens == 0
    for salt, cached in (("b", False), ("a", True)):
        again = await complete(client, prompt=PROMPT * 12, cache_salt=salt, max_tokens=1)
        assert bool(again.usage.prompt_tokens_details.cached_tokens) == cached
    late = await complete(client, timeout=0.05, max_tokens=200, ignore_eos=True)
    assert late.choices[0].finish_reason == "length" and late.usage.completion_tokens < 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_timeout_before_the_first_token_is_a_plain_408(serve: Serve, stream: bool) -> None:
    async with serve(endless, max_running=1) as served:
        served.runner.hold()
        first = asyncio.create_task(served.complete(max_tokens=5))
        await until(lambda: served.llm.num_live == 1)
        late = asyncio.create_task(served.complete(max_tokens=5, timeout=0.001, stream=stream))
        await until(lambda: served.llm.num_live == 2)
        passed_s = time.monotonic() + 0.001
        await until(lambda: time.monotonic() > passed_s)
        served.runner.let_go()
        told = await late
        assert (told.status, told.error["code"], told.error["type"]) == (408, "timeout", "invalid_request_error")
        assert (await first).status == 200


async def test_the_engine_in_process_takes_the_same(served: Any) -> None:
    llm, _ = served
    stream = await llm.generate(PROMPT, temperature=0, max_tokens=4, logprobs=1, priority=1, cache_salt="x")
    done = await stream.result()
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    choices = [await stream.result() for stream in await llm.choices([5, 6], n=3, temperature=1, seed=6, max_tokens=8)]
    assert len({choice.token_ids for choice in choices}) > 1
    with pytest.raises(InvalidRequest, match="choices"):
        await llm.generate(PROMPT, n=2)


async def test_choices_share_the_computation_of_their_prompt(served: Any) -> None:
    llm, _ = served
    streams = llm.submit_choices(list(range(3, 73)), SamplingParams(n=3, max_tokens=3))
    assert [(await stream.result()).num_cached_tokens for stream in streams] == [0, 64, 64]


async def test_our_own_client_passes_every_field(served: Any) -> None:
    _, openai_client = served
    async with AsyncClient(str(openai_client.base_url)) as client:
        told = await client.chat.completions.create(
            messages=HI, n=2, logprobs=True, top_logprobs=2, seed=1, max_tokens=4, presence_penalty=1, cache_salt="x"
        )
        assert [len(choice.logprobs["content"]) for choice in told.choices] == [4, 4]
        async with client.chat.completions.stream(messages=HI, logprobs=True, max_tokens=4, temperature=0) as stream:
            final = await stream.get_final_completion()
        assert len(final.choices[0].logprobs["content"]) == 4
        echoed = await client.completions.create(prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
        assert echoed.choices[0].text.startswith(PROMPT) and echoed.choices[0].logprobs["token_logprobs"][0] is None


def test_the_blocking_face_makes_choices_too(folder: Path) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 6, "max_tokens": 5}
    with asyncllm.load(str(folder), device="cpu", threads=1, max_model_len=256, max_waiting=2, max_running=4) as llm:
        drawn = llm.generate([PROMPT, "One two"], n=4, logprobs=0, **fields)
        best = llm.generate([PROMPT, "One two"], best_of=4, **fields)
    assert len(drawn) == 8 and len(best) == 2
    for i, told in enumerate(best):
        assert told.text in [answer.text for answer in drawn[4 * i : 4 * i + 4]]
        means = [sum(entry.logprob for entry in answer.logprobs) / 5 for answer in (told, *drawn[4 * i : 4 * i + 4])]
        # Another batch rounds otherwise.
        assert means[0] == pytest.approx(max(means), abs=1e-4) or len(told.token_ids) < 5


# -- every field that openai's package types --

Effect = Callable[[Any, Any], bool]  # (the plain answer, the one with the field) -> whether the field shows


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    return str(choice.text if hasattr(choice, "text") else choice.message.content)


def other_text(plain: Any, told: Any) -> bool:
    return text_of(plain) != text_of(told)


REFUSED, LABEL, CALL = "refused", "label", "the call's own"
SHARED: dict[str, tuple[Any, Effect | str]] = {
    "frequency_penalty": (2, other_text), "presence_penalty": (2, other_text), "logit_bias": ({"70": 100}, other_text),
    "max_tokens": (3, lambda plain, told: told.usage.completion_tokens == 3),
    "n": (2, lambda plain, told: len(told.choices) == 2),
    "seed": (8, other_text), "temperature": (0.1, other_text), "top_p": (0.01, other_text),
    "stop": (["e", "o", "a", "i", " "], lambda plain, told: told.choices[0].finish_reason == "stop"),
    "user": ("x", LABEL), "model": ("tiny", CALL), "stream": (True, CALL), "stream_options": ({}, LABEL),
}  # fmt: skip
CHAT: dict[str, tuple[Any, Effect | str]] = SHARED | {
    "messages": (HI, CALL),
    "max_completion_tokens": (3, lambda plain, told: told.usage.completion_tokens == 3),
    "logprobs": (True, lambda plain, told: bool(told.choices[0].logprobs.content)),
    "top_logprobs": (2, REFUSED),  # without logprobs
    "audio": ({"voice": "x", "format": "mp3"}, REFUSED), "functions": ([{"name": "f"}], REFUSED),
    "function_call": ({"name": "f"}, REFUSED), "modalities": (["audio"], REFUSED), "verbosity": ("low", REFUSED),
    "prediction": ({"type": "content", "content": "x"}, REFUSED), "web_search_options": ({"a": 1}, REFUSED),
    "moderation": ({"a": 1}, REFUSED), "metadata": ({"a": "b"}, LABEL), "service_tier": ("auto", LABEL),
    "store": (True, LABEL), "safety_identifier": ("x", LABEL), "prompt_cache_key": ("x", LABEL),
    "prompt_cache_options": ({"a": 1}, LABEL), "prompt_cache_retention": ("24h", LABEL),
}  # fmt: skip
TEXT: dict[str, tuple[Any, Effect | str]] = SHARED | {
    "prompt": (PROMPT, CALL), "suffix": ("x", REFUSED),
    "best_of": (5, lambda plain, told: len(told.choices) == 1 and told.usage.completion_tokens > 0),
    "echo": (True, lambda plain, told: text_of(told) == PROMPT + text_of(plain)),
    "logprobs": (1, lambda plain, told: bool(told.choices[0].logprobs.tokens)),
}  # fmt: skip
# Fields of tools, structure and reasoning have their own tests.
ELSEWHERE = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}


def openai_fields(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


def test_the_tables_hold_every_field_of_openai() -> None:
    chat_kinds = (chat_types.CompletionCreateParamsStreaming, chat_types.CompletionCreateParamsNonStreaming)
    text_kinds = (text_types.CompletionCreateParamsStreaming, text_types.CompletionCreateParamsNonStreaming)
    assert openai_fields(*chat_kinds) == set(CHAT) | ELSEWHERE
    assert openai_fields(*text_kinds) == set(TEXT)


@pytest.mark.parametrize(("route", "table"), [(chat, CHAT), (complete, TEXT)], ids=["chat", "completions"])
async def test_every_field_works_or_is_refused_by_name(served: Any, route: Any, table: Any) -> None:
    _, client = served
    base = {"temperature": 1.0, "seed": 7, "max_tokens": 60, "allowed_token_ids": list(range(30, 100))}
    plain = await route(client, **base)
    for name, (value, effect) in table.items():
        if effect == REFUSED:
            await refused(route(client, **base, extra={name: value}), name)
        elif effect == LABEL:
            assert text_of(await route(client, **base, extra={name: value})) == text_of(plain), name
        elif effect != CALL:
            told = await route(client, **base, extra={name: value})
            assert effect(plain, told), name


async def test_the_token_that_ends_a_response_has_its_logprob_streamed_too(served: Any) -> None:
    _, client = served
    drawn = (await chat(client, return_token_ids=True)).choices[0].token_ids
    ask: Any = {"model": "tiny", "input": "Hello there", "temperature": 0, "include": ["message.output_text.logprobs"]}
    for stop_id in (drawn[0], drawn[3]):
        ask["extra_body"] = {"stop_token_ids": [stop_id]}
        whole = await client.responses.create(**ask)
        told = whole.output[0].content[0].logprobs
        assert len(told) == whole.usage.output_tokens == drawn.index(stop_id) + 1
        events = [event async for event in await client.responses.create(stream=True, **ask)]
        said = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        ended = events[-1].response
        assert [one.token for one in said] == [one.token for one in told]
        assert [one.token for one in ended.output[0].content[0].logprobs] == [one.token for one in told]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_leaves_no_token_is_the_requests_fault_and_costs_no_prefix(served: Any, stream: bool) -> None:
    """A 400 that names it, which nobody sends again; and the next who shares the prompt finds it computed."""
    llm, client = served
    eos, (letter,), prompt = llm.tokenizer.eos_ids[0], llm.tokenizer.encode("x"), list(range(20, 60))
    await complete(client, prompt=prompt, max_tokens=1)
    for fields, param in (
        ({"allowed_token_ids": [letter], "bad_words": ["x"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [eos], "min_tokens": 2}, "allowed_token_ids"),
        ({"guided_regex": "x+", "bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "x+", "stop_token_ids": [letter], "min_tokens": 2}, "min_tokens"),
    ):
        await refused(complete(client, prompt=prompt, stream=stream, **fields), param)
        again = await complete(client, prompt=prompt, max_tokens=1)
        assert again.usage.prompt_tokens_details.cached_tokens == 32
