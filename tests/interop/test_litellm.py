"""LiteLLM, told that we are some OpenAI-compatible server."""

import importlib.util
import json

import pytest

from ..server.conftest import HI, MODEL, Serve, endless

if importlib.util.find_spec("litellm") is None:  # importing it here would ask the network: see the fixture
    pytest.skip("litellm is not installed", allow_module_level=True)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network at import
    return pytest.importorskip("litellm")


@pytest.mark.filterwarnings("ignore")  # its own
async def test_chat_whole_and_streamed(serve: Serve, litellm: object) -> None:
    async with serve("Hello ďábelské 😀.") as served:
        fields = {"model": f"openai/{MODEL}", "api_base": served.url + "/v1", "api_key": "-", "messages": HI}
        answer = await litellm.acompletion(**fields)
        assert answer.choices[0].message.content == "Hello ďábelské 😀."
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens > 0) == ("stop", True)
        stream = await litellm.acompletion(**fields, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "Hello ďábelské 😀."


@pytest.mark.filterwarnings("ignore")
async def test_errors_are_its_own(serve: Serve, litellm: object) -> None:
    async with serve("Hello.", max_model_len=64) as served:
        fields = {"model": f"openai/{MODEL}", "api_base": served.url + "/v1", "api_key": "-", "max_retries": 0}
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(**fields, messages=[{"role": "user", "content": "x " * 200}])
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(**fields | {"model": "openai/other"}, messages=HI)


CALL = 'So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_tools_by_either_api(serve: Serve, litellm: object, provider: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    async with serve(CALL, **LONG) as served:
        base = served.url + ("/v1" if provider == "openai" else "")
        fields = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "-", "messages": HI, "tools": tools}
        answer = await litellm.acompletion(**fields, max_tokens=200)
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = await litellm.acompletion(**fields, max_tokens=200, stream=True)
        joined = litellm.stream_chunk_builder([chunk async for chunk in stream])
        for one in (answer, joined):
            [call] = one.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Brno"})


@pytest.mark.filterwarnings("ignore")
async def test_structured_output_and_leaving(serve: Serve, litellm: object) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}}, "required": ["name"]}
    form = {"name": "person", "schema": schema | {"additionalProperties": False}, "strict": True}
    async with serve(endless, **LONG) as served:
        fields = {"model": f"openai/{MODEL}", "api_base": served.url + "/v1", "api_key": "-", "messages": HI}
        answer = await litellm.acompletion(**fields, response_format={"type": "json_schema", "json_schema": form})
        assert json.loads(answer.choices[0].message.content)["name"] in ("Ada", "Bob")
        served.runner.hold(permits=20)
        stream = await litellm.acompletion(**fields, stream=True)
        await anext(stream)
        await stream.completion_stream.response.aclose()
        served.runner.let_go()
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1
