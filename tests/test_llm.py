"""AsyncLLM and LLM on the real engine and GPU thread, with a runner that needs no torch."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import asyncllm
from asyncllm import build
from asyncllm.errors import Aborted, AsyncLLMError, ContextTooLong, Draining, EngineDead, InvalidRequest, QueueFull
from asyncllm.llm import AsyncLLM
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Delta, FinishReason, SamplingParams
from tests.fakes import ScriptedRunner, engine_config, limits_for, scripted, scripted_llm, until
from tests.text.toys import byte_level
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level(tmp_path_factory.mktemp("toy")))


async def until_idle(llm: AsyncLLM) -> None:
    """The engine has given everything back; its heartbeat says so within a few turns."""
    await until(lambda: not (llm.num_live or llm.stats.num_running or llm.stats.num_waiting or llm.stats.pages_used))


async def test_streams_text_and_counts(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("Hello, how are you")
    async with scripted_llm(tokenizer, next_token=scripted(said, after=2)) as (llm, _):
        deltas = [delta async for delta in await llm.generate("Hi", temperature=0)]
        assert "".join(delta.text for delta in deltas) == "Hello, how are you"
        last = deltas[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
        assert last.num_output_tokens == len(said) + 1  # the stop id is counted, and never shown
        assert last.num_prompt_tokens == len(tokenizer.encode("Hi"))
        assert last.timings is not None and last.timings.arrival_s <= last.timings.finished_s


async def test_a_lagging_reader_gets_the_same_text_in_fewer_deltas(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    async with scripted_llm(tokenizer, next_token=scripted(said, after=2)) as (llm, _):
        stream = await llm.generate("Hi", temperature=0)
        await until(lambda: bool(stream._mailbox.ended))
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1 and deltas[0].text == "The quick brown fox jumps over the lazy dog."
        assert list(deltas[0].token_ids) == [*said, 2]


async def test_one_stop_string_may_stand_alone(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    async with scripted_llm(tokenizer, next_token=scripted(said, after=2)) as (llm, _):
        assert (await (await llm.generate("Hi", temperature=0, stop="own f")).result()).text == "The quick br"


async def test_stop_string_ends_the_text_and_the_sequence(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    async with scripted_llm(tokenizer, next_token=scripted(said, after=2)) as (llm, _):
        done = await (await llm.generate("Hi", temperature=0, stop=["own f", "zzz"])).result()
        assert (done.text, done.stop_reason, done.finish_reason) == ("The quick br", "own f", FinishReason.STOP)
        assert len(done.token_ids) < len(said)
        await until_idle(llm)
        assert llm.totals.finished == {"stop": 1}
        assert llm.totals.num_output_tokens == len(done.token_ids)


@pytest.mark.parametrize("way", ["break", "block", "abort", "cancel"])
async def test_every_way_of_leaving_aborts(tokenizer: Tokenizer, way: str) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        runner.hold(permits=3)  # or it would be complete before anybody has left

        async def leave() -> None:
            stream = await llm.generate("Hi", ignore_eos=True)
            if way == "block":
                async with stream:
                    await anext(stream)
                return
            async for _ in stream:
                if way == "abort":
                    stream.abort()
                    with pytest.raises(Aborted):
                        while True:
                            await anext(stream)
                if way != "cancel":
                    break

        task = asyncio.create_task(leave())
        if way == "cancel":
            await until(lambda: bool(llm.stats.step))
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        gc.collect()
        await until(lambda: not llm.num_live)
        runner.let_go()
        await until_idle(llm)
        assert llm.totals.finished == {"abort": 1}


async def test_what_is_wrong_is_told_before_the_engine_hears_of_it(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        for fields, param in (
            ({"temperature": 3}, "temperature"), ({"top_p": float("nan")}, "top_p"), ({"n": 2}, "n"),
            ({"logprobs": 21}, "logprobs"), ({"stop": [""]}, "stop[0]"), ({"max_tokens": 0}, "max_tokens"),
            ({"stop_token_ids": [9999]}, "stop_token_ids[0]"), ({"no_such": 1}, "no_such"), ({"seed": "x"}, "seed"),
            ({"top_k": 5, "temperature": "hot"}, "temperature"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest) as caught:
                await llm.generate("Hi", **fields)
            assert caught.value.param == param
        with pytest.raises(InvalidRequest):
            await llm.generate([1, 99999])
        with pytest.raises(ContextTooLong, match="maximum context length is"):
            await llm.generate([1] * 128)
        with pytest.raises(InvalidRequest, match="no chat template"):
            await llm.chat([{"role": "user", "content": "Hi"}])
        assert runner.batches == [] and llm.num_live == 0


async def test_more_than_may_wait_is_refused(tokenizer: Tokenizer) -> None:
    config = engine_config(max_running=2, max_waiting=3)
    async with scripted_llm(tokenizer, config=config) as (llm, runner):
        runner.hold()
        streams = [await llm.generate("Hi", ignore_eos=True) for _ in range(5)]
        with pytest.raises(QueueFull):
            await llm.generate("Hi")
        streams.pop().abort()
        await (await llm.generate("Hi", max_tokens=1)).__aexit__()
        runner.let_go()
        assert len(await asyncio.gather(*(stream.result() for stream in streams))) == 4


async def test_LIFE_1_a_dead_engine_leaves_nobody_waiting(tokenizer: Tokenizer, caplog: Any) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):

        def dies(batch: object) -> None:
            raise EngineDead("device lost")

        runner.hold()
        streams = [await llm.generate("Hi", ignore_eos=True) for _ in range(20)]  # 8 run, 12 wait
        runner.on_result = dies
        runner.let_go()
        for stream in streams:
            with pytest.raises(EngineDead):
                await stream.result()
        assert isinstance(await llm.wait_died(), EngineDead)
        with pytest.raises(EngineDead):
            await llm.generate("Hi")
        assert runner.closed.is_set() and "the engine has died" in caplog.text


async def test_a_bug_in_delivery_is_an_engines_death(tokenizer: Tokenizer, monkeypatch: Any, caplog: Any) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):

        def broken(entries: object) -> None:
            raise TypeError("bug")

        monkeypatch.setattr(llm._registry, "_deliver", broken)
        stream = await llm.generate("Hi", ignore_eos=True)
        with pytest.raises(EngineDead):
            await stream.result()
        assert isinstance(llm.dead, EngineDead) and "cannot be delivered" in caplog.text
        assert await asyncio.to_thread(runner.closed.wait, 30)


async def test_drain_lets_what_runs_finish_and_takes_nothing_new(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        runner.hold()
        stream = await llm.generate("Hi", ignore_eos=True, max_tokens=5)
        draining = asyncio.create_task(llm.drain(60))
        await until(lambda: bool(llm.draining))
        with pytest.raises(Draining):
            await llm.generate("Hi")
        runner.let_go()
        assert len((await stream.result()).token_ids) == 5
        await draining


async def test_drain_ends_the_rest_with_an_error(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        runner.hold()
        stream = await llm.generate("Hi", ignore_eos=True)
        await llm.drain(0)
        with pytest.raises(Draining):
            await stream.result()
        runner.let_go()
        await until_idle(llm)


async def test_text_before_an_error_is_read_first(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("Hello, how are you")
    async with scripted_llm(tokenizer, next_token=scripted(said)) as (llm, runner):
        runner.hold(permits=4)
        stream = await llm.generate("Hi", ignore_eos=True)
        await until(lambda: len(stream._mailbox._token_ids) >= 3)
        llm.abort(stream.request_id)
        first: Delta = await anext(stream)
        assert first.text and first.finish_reason is None
        with pytest.raises(Aborted):
            await anext(stream)
        runner.let_go()


async def test_chat_renders_the_models_own_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(byte_level(tmp_path))
    async with scripted_llm(tokenizer, template, scripted([], after=2)) as (llm, _):
        stream = await llm.chat([{"role": "user", "content": "Hi <|im_end|>"}])
        ids = stream._mailbox.submission.prompt_ids
        assert ids.count(2) == 1  # the template's; the typed one is text
        assert (await stream.result()).text == ""


async def test_unseeded_requests_differ_and_seeds_are_64_bits(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, _):
        streams = [await llm.generate("Hi") for _ in range(4)] + [await llm.generate("Hi", seed=-1)]
        seeds = [stream._mailbox.submission.seed for stream in streams]
        assert len(set(seeds)) == 5 and seeds[-1] == 2**64 - 1
        for stream in streams:
            stream.abort()


class Breaking:
    """A detokenizer that fails as a library may."""

    def push(self, token_ids: Any) -> str:
        raise ValueError("no such token")

    finish = push


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["read", "delivered"])
async def test_text_that_cannot_be_made_ends_its_request_alone(tokenizer: Tokenizer, stop: Any, caplog: Any) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        runner.hold()
        bad = await llm.generate("Hi", ignore_eos=True, stop=stop)
        bad._mailbox._detokenizer = Breaking()  # type: ignore[assignment]
        good = await llm.generate("Hi", ignore_eos=True, max_tokens=20)
        runner.let_go()
        with pytest.raises(AsyncLLMError, match="could not be turned into text"):
            await bad.result()
        assert len((await good.result()).token_ids) == 20
        assert len((await (await llm.generate("Hi", ignore_eos=True, max_tokens=3)).result()).token_ids) == 3
        await until_idle(llm)
        assert llm.totals.finished == {"error": 1, "length": 2} and "cannot be made" in caplog.text


async def test_values_of_the_wrong_kind_are_told_by_name(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, runner):
        prompts: list[Any] = [[1.5], [float("nan")], ["a"], b"abc", None, 5, [2**70]]
        for prompt in prompts:
            with pytest.raises(InvalidRequest) as caught:
                await llm.generate(prompt)
            assert caught.value.param == "prompt"
        for field, value in (("seed", 1.5), ("seed", "x"), ("max_tokens", 2.5), ("top_k", 2.5), ("stop", "abc"),
                             ("stop_token_ids", (1.5,)), ("temperature", None)):  # fmt: skip
            with pytest.raises(InvalidRequest) as caught:
                llm.submit([1, 2], SamplingParams(**{field: value}))  # type: ignore[arg-type]
            assert caught.value.param == field
        with pytest.raises(InvalidRequest):
            await llm.chat([5])  # type: ignore[list-item]
        assert runner.batches == []


async def test_a_start_that_is_cancelled_lets_its_engine_go(tokenizer: Tokenizer) -> None:
    loading, go_on = threading.Event(), threading.Event()
    config = engine_config()
    limits = limits_for(config, tokenizer.vocab_size)
    runner = ScriptedRunner(config, limits)

    def make_runner() -> ScriptedRunner:
        loading.set()
        assert go_on.wait(30)
        return runner

    async def start() -> None:
        words = {"tokenizer": tokenizer, "chat_template": None, "model_name": "cancelled"}
        async with build.running(make_runner, config, limits, **words):
            raise AssertionError("it was cancelled before it was ready")

    task = asyncio.create_task(start())
    await asyncio.to_thread(loading.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(runner.closed.wait, 30)


async def test_a_stuck_step_does_not_keep_the_program(tokenizer: Tokenizer, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(build, "JOIN_S", 0.05)
    never = threading.Event()
    async with scripted_llm(tokenizer) as (llm, runner):
        runner.on_result = lambda batch: never.wait(30) and None
        stream = await llm.generate("Hi", ignore_eos=True)
        await until(lambda: llm.stats.step > 0)
    never.set()
    del stream
    assert "a step is stuck" in caplog.text
    assert await asyncio.to_thread(runner.closed.wait, 30)


async def test_a_draining_engine_refuses_before_it_tokenises(tokenizer: Tokenizer) -> None:
    async with scripted_llm(tokenizer) as (llm, _):
        await llm.drain(0)
        with pytest.raises(Draining):
            await llm.generate("a long prompt " * 1000)


def test_load_generates_a_list_in_order(tmp_path: Path) -> None:
    with asyncllm.load(str(make_checkpoint(tmp_path / "tiny")), threads=1, max_running=4, max_waiting=4) as llm:
        prompts: list[Any] = ["Hello", [5, 6, 7], "The quick brown fox"] * 8  # three times what may be live at once
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert [len(answer.token_ids) for answer in answers] == [6] * 24
        assert answers[0].token_ids == answers[3].token_ids != answers[1].token_ids
        with pytest.raises(InvalidRequest):
            llm.generate(["Hi", "Hi"], temperature=9)
        chat = llm.chat([[{"role": "user", "content": "Hi"}]], max_tokens=3)
        assert chat[0].num_prompt_tokens > 1


def test_what_a_call_leaves_open_is_as_the_models_makers_say(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 1, "min_p": null, "do_sample": true}')
    drawn = {"temperature": 2, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    with asyncllm.load(str(folder), threads=1) as llm:
        [likeliest] = llm.generate(["Hello"], **drawn | {"temperature": 0})
        assert llm.generate(["Hello"], **drawn)[0].text == likeliest.text
        assert llm.generate(["Hello"], top_k=0, **drawn)[0].text != likeliest.text
        assert llm.generate(["Hello"], SamplingParams(**drawn))[0].text != likeliest.text  # says all of it
    with asyncllm.load(str(folder), threads=1, sampling_defaults="openai") as llm:
        assert llm.generate(["Hello"], **drawn)[0].text != likeliest.text
    with pytest.raises(ValueError, match="sampling_defaults 'mine' is unknown; known are model, openai"):
        asyncllm.load(str(folder), sampling_defaults="mine")


def test_an_answer_keeps_to_a_grammar_in_process(tmp_path: Path) -> None:
    digits = asyncllm.GrammarSpec("regex", "[0-9]{3}")
    with asyncllm.load(str(make_checkpoint(tmp_path / "tiny")), threads=1) as llm:
        answers = llm.generate(["Hello", "The"], grammar=digits)
        assert all(len(answer.text) == 3 and answer.text.isdecimal() for answer in answers)
        assert {answer.finish_reason.value for answer in answers} == {"stop"}
        for wrong in (asyncllm.GrammarSpec("regex", "("), "[0-9]"):
            with pytest.raises(asyncllm.errors.InvalidRequest) as caught:
                llm.generate(["Hello"], grammar=wrong)
            assert caught.value.param == "grammar"
        with pytest.raises(asyncllm.errors.InvalidRequest, match="compiled first"):
            llm._llm.submit([1], asyncllm.SamplingParams(grammar=digits))


def test_what_cannot_be_loaded_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown option pages; known are"):
        asyncllm.load(pages=3)
    with pytest.raises(asyncllm.errors.ModelError, match="no-such"):
        asyncllm.load(str(tmp_path / "no-such"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"vocab_size": None}), ("config.json", {"vocab_size": "512"}),
        ("config.json", {"num_hidden_layers": 0}), ("config.json", {"num_attention_heads": None}),
        ("config.json", {"max_position_embeddings": None}), ("config.json", {"rms_norm_eps": "x"}),
        ("config.json", {"rope_parameters": 5}), ("config.json", "[" * 100_000),
        ("generation_config.json", {"eos_token_id": ["x"]}), ("generation_config.json", {"temperature": "warm"}),
        ("generation_config.json", {"top_p": 9}), ("tokenizer.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff\xfe"), ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("model.safetensors.index.json", {"weight_map": 5}),
    ],
)  # fmt: skip
def test_a_folder_of_nonsense_is_a_model_error(tmp_path: Path, file: str, content: Any) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    path = folder / file
    if isinstance(content, dict):
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | content))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(asyncllm.errors.ModelError):
        asyncllm.load(str(folder), threads=1)
