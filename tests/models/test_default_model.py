"""The default model equals transformers in float32: 64 greedy tokens of three prompts, and the logits behind them."""

import pytest
import torch
import torch.nn.functional as F

import asyncllm
from asyncllm import hub
from asyncllm.models.config import ModelConfig
from asyncllm.models.layers import Placement, PlainLinear
from asyncllm.models.loader import load_model

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n    ",
)
NUM_TOKENS = 64


class WholePlan:
    """A Plan of one sequence, without pages: every token sees those before it."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(q), -1)


@pytest.mark.default_model
@pytest.mark.timeout(300)
def test_greedy_ids_and_logits_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = hub.resolve(None)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with asyncllm.load(str(folder), dtype="float32", threads=1, kv_cache_bytes=1 << 26) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        prompts = [llm._runner.run(llm._llm.encode_chat(chat)) for chat in chats]
        answers = llm.generate(prompts, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    config = ModelConfig.from_folder(folder)
    place = Placement(torch.device("cpu"), torch.float32, torch.float32, PlainLinear, config.vocab_size, 512)
    ours = load_model(folder, config, place)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids])
        with torch.inference_mode():
            expected = reference(ids[None]).logits[0]
            seen = ours.logits(ours(ids, torch.arange(len(ids)), WholePlan()))
        # Teacher-forced: at every position the greedy token is transformers' own argmax, so by induction the
        # 64 tokens are those of its greedy generate, which would take three times as long here.
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer.token_ids)
        torch.testing.assert_close(seen, expected, atol=1e-4, rtol=0)
