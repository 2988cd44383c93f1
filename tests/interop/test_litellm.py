"""LiteLLM, told that we are some OpenAI-compatible server."""

import importlib.util

import pytest

from ..server.conftest import HI, MODEL, Serve

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
