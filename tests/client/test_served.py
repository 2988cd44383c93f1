"""The client against the real server, AsyncLLM and engine; only the model's numbers are scripted."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncllm.client import (
    APIError,
    APIStatusError,
    AsyncClient,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    Retries,
    StreamTruncatedError,
)
from asyncllm.llm import AsyncLLM
from asyncllm.server.app import listening
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from tests.fakes import NextToken, ScriptedRunner, engine_config, scripted, scripted_llm
from tests.text import toys

from .fake import MESSAGES

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "Hello, naïve 😀 box of 日本語 jugs."


def endless(context: list[int], prompt_len: int) -> int:
    return 70 + (len(context) - prompt_len) % 20


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that the engine's thread brings about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def served(
    folder: Path, next_token: NextToken | None = None, **config: object
) -> AsyncIterator[tuple[AsyncClient, AsyncLLM, ScriptedRunner]]:
    tokenizer = Tokenizer.from_folder(toys.byte_level(folder))
    next_token = next_token or scripted(tokenizer.encode(ANSWER), toys.EOS_ID)
    template = ChatTemplate(toys.CHATML)
    async with (
        scripted_llm(tokenizer, template, next_token, engine_config(**config)) as (llm, runner),
        listening(llm, port=0) as url,
        AsyncClient(url) as client,
    ):
        try:
            yield client, llm, runner
        finally:
            runner.let_go()


async def test_whole_and_streamed_are_the_same(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _, _):
        whole = await client.chat.completions.create(messages=MESSAGES, temperature=0)
        async with client.chat.completions.stream(messages=MESSAGES, temperature=0) as running:
            joined = "".join([text async for text in running.text_stream])
            final = await running.get_final_completion()
        assert whole.choices[0].message.content == joined == ANSWER
        assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert whole._request_id is not None and running.request_id is not None
        text = await client.completions.create(prompt="Say", temperature=0, max_tokens=100)
        async with client.completions.stream(prompt="Say", temperature=0, max_tokens=100) as completing:
            assert await completing.get_final_text() == text.choices[0].text == ANSWER
        streamed = [
            chunk
            async for chunk in await client.completions.create(
                prompt=[5, 6], max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert streamed[-1].usage is not None
        assert (streamed[-1].usage.prompt_tokens, streamed[-1].usage.completion_tokens) == (2, 3)


async def test_models_and_errors(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _, _):
        (model,) = (await client.models.list()).data
        assert (model.id, model.max_model_len) == ("scripted", 128)
        assert (await client.models.retrieve("scripted")).id == "scripted"
        with pytest.raises(NotFoundError) as missing:
            await client.models.retrieve("org/none")
        assert missing.value.code == "model_not_found"
        for stream in (True, False):
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(messages=[], stream=stream)
            assert (caught.value.param, caught.value.type) == ("messages", "invalid_request_error")
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(prompt="x " * 500)
        assert caught.value.code == "context_length_exceeded"


async def test_leaving_a_stream_aborts_its_request_in_the_engine(tmp_path: Path) -> None:
    async with served(tmp_path, endless) as (client, llm, runner):
        runner.hold(permits=4)
        async with await client.chat.completions.create(messages=MESSAGES, stream=True) as running:
            await anext(running)
            assert llm.num_live == 1
        await until(lambda: llm.num_live == 0)
        runner.let_go()
        await until(lambda: llm.stats.num_running == llm.stats.pages_used == 0)


async def test_a_cancelled_whole_request_is_aborted_too(tmp_path: Path) -> None:
    async with served(tmp_path, endless) as (client, llm, runner):
        runner.hold()
        asking = asyncio.ensure_future(client.chat.completions.create(messages=MESSAGES))
        await until(lambda: llm.num_live == 1)
        asking.cancel()
        await until(lambda: llm.num_live == 0)


async def test_a_failing_step_reaches_the_reader_as_the_servers_own_error(tmp_path: Path) -> None:
    async with served(tmp_path, endless) as (client, _, runner):
        runner.hold(permits=3)
        running = await client.chat.completions.create(messages=MESSAGES, stream=True)
        await anext(running)

        def fail(batch: object) -> None:
            raise RuntimeError("a scripted fault")

        runner.on_result = fail
        runner.let_go()
        with pytest.raises(APIError) as caught:
            async for _ in running:
                pass
        assert not isinstance(caught.value, StreamTruncatedError)
        assert caught.value.code == "step_failed"


async def test_a_draining_server_is_an_error_that_may_pass(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, llm, _):
        llm.draining = True
        with pytest.raises(APIStatusError) as caught:
            await client.with_options(max_retries=0).chat.completions.create(messages=MESSAGES)
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        assert Retries().delay_s(caught.value, 0) is not None


async def test_many_streams_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, llm, _):

        async def one() -> str:
            async with client.chat.completions.stream(messages=MESSAGES, temperature=0) as running:
                return await running.get_final_text()

        assert await asyncio.gather(*[one() for _ in range(64)]) == [ANSWER] * 64
        assert llm.num_live == 0


async def test_conc_3_more_than_the_server_takes_are_answered_rightly_or_refused(tmp_path: Path) -> None:
    num, taken = 300, 8 + 120
    async with served(tmp_path, max_running=8, max_waiting=120) as (client, llm, runner):
        patient = client.with_options(max_retries=0)
        runner.hold()  # until everyone is there

        async def one(i: int) -> str:
            if i % 2:
                whole = await patient.chat.completions.create(messages=MESSAGES, temperature=0)
                return whole.choices[0].message.content or ""
            async with patient.chat.completions.stream(messages=MESSAGES, temperature=0) as running:
                return await running.get_final_text()

        asking = [asyncio.ensure_future(one(i)) for i in range(num)]
        await until(lambda: sum(task.done() for task in asking) == num - taken)
        runner.let_go()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, InternalServerError)]
        assert [answer for answer in answers if isinstance(answer, str)] == [ANSWER] * taken
        assert len(refused) == num - taken
        assert all(error.code == "queue_full" and int(error.headers["retry-after"]) > 0 for error in refused)
        assert llm.num_live == 0


async def test_the_example_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", str(ROOT / "examples" / "client.py"), client.base_url,
            env={"PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    lines = out.decode().splitlines()
    assert lines[0] == lines[1] == ANSWER
    assert lines[3].startswith("BadRequestError: ")


def test_the_client_loads_no_engine() -> None:
    """Neither torch nor a tokenizer nor any floor but the client's own and the wire's event-stream."""
    code = (
        "import sys; from asyncllm import AsyncClient; "
        "print(*[m for m in sys.modules if m in ('torch', 'transformers', 'tokenizers', 'numpy', 'jinja2')"
        " or m.startswith(('asyncllm.engine', 'asyncllm.server', 'asyncllm.text', 'asyncllm.llm'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
