"""Clients with environments of their own, as their pins clash: Python and node programs against the real server.

`make interop` makes the environments below .interop/; what is not there is skipped.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..e2e.process import ServerProcess
from ..server.conftest import MODEL, Serve, Served, endless
from ..text import toys
from ..tiny import make_checkpoint

HERE = Path(__file__).parent
HOMES = Path(os.environ.get("ASYNCLLM_INTEROP", HERE.parents[1] / ".interop"))
pytestmark = pytest.mark.skipif(not HOMES.is_dir(), reason="make interop makes .interop/")
TEXT = "Hello ďábelské 😀."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
ROOMY = {"max_model_len": 4096, "num_pages": 2000, "page_size": 16, "max_step_tokens": 4096}


def answers(served: Served):  # type: ignore[no-untyped-def]
    """A model that calls a tool where the prompt ends in CALL, never ends where it ends in ENDLESS, and else greets."""
    texts = {word: served.tokenizer.encode(text) for word, text in (("CALL", CALL), ("", TEXT))}

    def next_token(context: list[int], prompt_len: int) -> int:
        prompt = served.tokenizer.decode(context[max(0, prompt_len - 60) : prompt_len])
        last = prompt.rsplit("user", 1)[-1]
        if "ENDLESS" in last:
            return endless(context, prompt_len)
        text = texts["CALL" if "CALL" in last and "tool_response" not in last else ""]
        at = len(context) - prompt_len
        return text[at] if at < len(text) else toys.EOS_ID

    return next_token


async def run(*command: str | Path, cwd: Path = HOMES, timeout_s: float = 100, **env: str | Path) -> str:
    """A program's output; it fails the test by failing."""
    quiet = {"PATH": os.environ["PATH"], "HOME": str(cwd), "NO_COLOR": "1"} | {k: str(v) for k, v in env.items()}
    process = await asyncio.create_subprocess_exec(
        *map(str, command), env=quiet, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


def program(home: str, name: str = "python") -> Path:
    path = HOMES / home / "bin" / name
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    return path


def in_node(script: str) -> tuple[str, Path]:
    """Node looks for packages beside the script."""
    node, home = shutil.which("node"), HOMES / "node"
    if node is None or not (home / "node_modules").is_dir():
        pytest.skip("there is no node, or no .interop/node")
    return node, Path(shutil.copy(HERE / script, home))


async def test_llamaindex(serve: Serve) -> None:
    async with serve(**ROOMY) as served:
        served.runner.next_token = answers(served)
        await run(program("llamaindex"), HERE / "with_llamaindex.py", served.url, MODEL)
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1


@pytest.mark.parametrize("script", ["with_openai.mjs", "with_ai_sdk.mjs"])
async def test_in_node(serve: Serve, script: str) -> None:
    async with serve(**ROOMY) as served:
        served.runner.next_token = answers(served)
        await run(*in_node(script), served.url, MODEL)
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1


LLM_MODELS = """
- {{model_id: chat, model_name: {model}, api_base: "{url}/v1", supports_tools: true}}
- {{model_id: text, model_name: {model}, api_base: "{url}/v1", completion: true}}
- {{model_id: schema, model_name: {model}, api_base: "{url}/v1", supports_schema: true}}
- {{model_id: none, model_name: no-such, api_base: "{url}/v1"}}
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = "def get_weather(city: str) -> str:\n    return 'sunny in ' + city"


async def test_llm(serve: Serve, tmp_path: Path) -> None:
    """The command line tool `llm`."""
    llm = program("llm", "llm")
    async with serve(**ROOMY) as served:
        served.runner.next_token = answers(served)
        (tmp_path / "extra-openai-models.yaml").write_text(LLM_MODELS.format(model=MODEL, url=served.url))
        env: dict[str, Any] = {"cwd": tmp_path, "LLM_USER_PATH": tmp_path, "OPENAI_API_KEY": "-"}
        for options in (["-m", "chat"], ["-m", "chat", "--no-stream"], ["-m", "text", "-o", "max_tokens", "60"]):
            assert (await run(llm, *options, "hi", **env)).strip() == TEXT
        assert "output" in await run(llm, "-m", "chat", "--usage", "hi", **env)
        for stream in ([], ["--no-stream"]):
            told = await run(llm, "-m", "chat", "--functions", TOOL, "--tools-debug", "weather? CALL", *stream, **env)
            assert "sunny in Brno" in told and told.strip().endswith(TEXT)
        person = await run(llm, "-m", "schema", "--schema", json.dumps(SCHEMA), "hi", **env)
        assert json.loads(person)["name"] in ("Ada", "Bob")
        with pytest.raises(AssertionError, match="no-such"):
            await run(llm, "-m", "none", "hi", **env)
        served.runner.hold(permits=100)
        with pytest.raises(TimeoutError):  # and it is killed
            await run(llm, "-m", "chat", "ENDLESS", **env, timeout_s=4)
        served.runner.let_go()
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1


# -- what measures: against a real model, tiny and random --


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("interop") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(tiny)) as process:
        yield process


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: data.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["yes", "no", "perhaps"]
doc_to_target: a
metric_list: [{metric: acc}]
"""


async def test_lm_eval(server: ServerProcess, tmp_path: Path) -> None:
    """Scores continuations by echo and logprobs; its tokenizer is the server's."""
    lm_eval = program("lm_eval", "lm_eval")
    (tmp_path / "tiny_choice.yaml").write_text(TASK)
    questions = [json.dumps({"q": f"Is {i} even? Answer:", "a": i % 2}) for i in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(questions))
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_retries=1"
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", model, "--tasks", "tiny_choice"]
    command += ["--include_path", ".", "--output_path", "out", "--log_samples"]
    await run(*command, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(results.read_text())["results"]["tiny_choice"]["acc,none"] <= 1
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    scores = [float(one[0]) for line in samples.read_text().splitlines() for one in json.loads(line)["filtered_resps"]]
    assert len(scores) == 18 and all(score < 0 for score in scores) and len(set(scores)) > 9


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_guidellm(server: ServerProcess, tiny: Path, tmp_path: Path, path: str) -> None:
    guidellm = program("guidellm", "guidellm")
    (tmp_path / "prompts.txt").write_text("\n".join([f"The quick brown fox number {i}" for i in range(20)]))
    backend = f"kind=openai_http,target={server.url},model=tiny,request_format={path},max_tokens=8"
    command = [guidellm, "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=8", "--data", "kind=text_file,path=prompts.txt"]
    command += ["--tokenizer", f"kind=hf_auto,model={tiny}", "--output", "kind=json,path=out.json", "--disable-console"]
    await run(*command, cwd=tmp_path, HF_HUB_OFFLINE="1")
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
async def test_aiperf(server: ServerProcess, tiny: Path, tmp_path: Path, kind: str) -> None:
    aiperf = program("aiperf", "aiperf")
    command = [aiperf, "profile", "-m", "tiny", "--url", server.url, "--endpoint-type", kind, "--streaming"]
    command += ["--concurrency", "2", "--request-count", "8", "--tokenizer", str(tiny)]
    # An answer without text is an error there, and a random model may end at once, or say nothing but control tokens.
    command += ["--extra-inputs", json.dumps({"regex": "[a-z ]{200}"})]
    command += ["--prompt-input-tokens-mean", "40", "--prompt-output-tokens-mean", "8", "--output-artifact-dir", "out"]
    await run(*command, cwd=tmp_path)
    [export] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    told = json.loads(export.read_text())
    assert (told["request_count"]["avg"], told["error_summary"]) == (8, [])
    assert told["time_to_first_token"]["avg"] > 0


# -- what looks for faults --

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
FUZZ_S = int(os.environ.get("ASYNCLLM_FUZZ_S", "20"))


async def test_schemathesis(tiny: Path, tmp_path: Path) -> None:
    """Whatever the document allows, and much that it does not: no 5xx, nothing undocumented, no hang."""
    st = program("schemathesis", "st")
    with ServerProcess(str(tiny), "--max-model-len", "256") as process:
        command = [st, "run", f"{process.url}/openapi.json", "--checks", CHECKS, "--max-time", str(FUZZ_S)]
        command += ["--request-timeout", "30", "--workers", "2", "--continue-on-failure", "--no-color"]
        print(await run(*command, cwd=tmp_path, timeout_s=FUZZ_S + 120))
        async with aiohttp.ClientSession() as session, session.get(f"{process.url}/ready") as response:
            assert response.status == 200
        assert process.stop() == 0
        log = process.stderr()
        assert "Traceback" not in log, log
