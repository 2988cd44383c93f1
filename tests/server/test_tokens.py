"""/tokenize, /detokenize, /tokenizer_info and the refusal of /v1/embeddings."""

import asyncio
from typing import Any

import pytest

from asyncllm.server import tokens
from asyncllm.text.tokenizer import Tokenizer

from ..text import toys
from .conftest import HI, MODEL, Serve, refused

PATH = "/tokenize"


async def test_there_and_back_and_the_count_is_what_completions_and_chat_count(serve: Serve) -> None:
    text = "Hello ďábelské 😀."
    async with serve() as served:
        answer = (await served.post(PATH, {"prompt": text, "return_token_strs": True})).body
        assert answer["tokens"] == served.tokenizer.encode(text)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
        assert [served.tokenizer.spellings([one])[0] for one in answer["tokens"]] == answer["token_strs"]
        assert (await served.complete(text)).usage["prompt_tokens"] == answer["count"]
        back = await served.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
        assert back.body == {"prompt": text}
        chat = (await served.post(PATH, {"messages": HI})).body
        assert (chat["count"], chat["token_strs"]) == ((await served.chat()).usage["prompt_tokens"], None)


async def test_control_tokens_are_read_unless_they_are_to_be_text(serve: Serve) -> None:
    async with serve() as served:
        written = {"prompt": "<|im_end|>", "add_special_tokens": False}  # how lm-eval finds the EOS
        assert (await served.post(PATH, written)).body["tokens"] == [toys.EOS_ID]
        assert (await served.post(PATH, written | {"parse_special": False})).body["count"] > 1
        ids = {"tokens": [toys.EOS_ID, *served.tokenizer.encode("hi")]}
        assert (await served.post("/detokenize", ids)).body["prompt"] == "<|im_end|>hi"
        assert (await served.post("/detokenize", ids | {"skip_special_tokens": True})).body["prompt"] == "hi"


async def test_tools_and_template_variables_count_as_in_chat(serve: Serve) -> None:
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    async with serve(template=toys.TOOLS, max_model_len=2048, num_pages=600, max_step_tokens=2048) as served:
        counted = (await served.post(PATH, {"messages": HI} | fields)).body["count"]
        assert counted == (await served.chat(**fields)).usage["prompt_tokens"]
        assert counted > (await served.post(PATH, {"messages": HI})).body["count"]
        for ending in ({"add_generation_prompt": False}, {"continue_final_message": True}):
            body = {"messages": [*HI, {"role": "assistant", "content": "So"}]} | ending
            assert (await served.post(PATH, body)).body["count"] == (
                await served.chat(body["messages"], **ending)
            ).usage["prompt_tokens"]
        refused(await served.post(PATH, {"prompt": "x"} | fields), "tools")


async def test_the_start_token_is_put_in_once(serve: Serve, tmp_path: Any) -> None:
    tokenizer = Tokenizer.from_folder(toys.byte_fallback(tmp_path, metaspace=True))
    async with serve([5], tokenizer=tokenizer) as served:
        for fields, expected in (
            ({"prompt": "hello"}, tokenizer.encode("hello")),
            ({"prompt": "<s>hello"}, tokenizer.encode_rendered("<s>hello")),
            ({"prompt": "hello", "add_special_tokens": False}, tokenizer.encode("hello")[1:]),
            ({"prompt": "hello", "parse_special": False}, tokenizer.encode("hello")),
            ({"prompt": ""}, [1]),
        ):
            assert (await served.post(PATH, fields)).body["tokens"] == expected, fields


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {}, "prompt"), (PATH, {"prompt": "x", "messages": HI}, "prompt"), (PATH, {"prompt": 3}, "prompt"),
        (PATH, {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        (PATH, {"messages": HI, "parse_special": True}, "parse_special"), (PATH, {"messages": []}, "messages"),
        (PATH, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        (PATH, {"prompt": "\ud800"}, "prompt"), ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"), ("/detokenize", {"tokens": [400]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"), ("/v1/embeddings", {"input": "x"}, "model"),
        ("/v1/embeddings", {"input": "x", "model": 3}, "model"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(serve: Serve, path: str, fields: dict[str, Any], param: str | None) -> None:
    async with serve() as served:
        refused(await served.post(path, fields), param)
        missing = await served.post(path, {"prompt": "x", "tokens": [1]} | {"model": "no-such"})
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_a_long_text_leaves_the_loop_free_and_one_too_long_is_refused(serve: Serve) -> None:
    async with serve() as served:
        asking = asyncio.create_task(served.post(PATH, {"prompt": "hello " * 20_000}))
        while not asking.done():
            assert (await served.get("/health"))[0] == 200
        assert (await asking).body["count"] == len(served.tokenizer.encode("hello " * 20_000))
        refused(await served.post(PATH, {"prompt": "😀" * 300_000}), "prompt")


async def test_the_info_is_the_models_own_and_tells_no_paths(serve: Serve, tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(
        tokenizer._backend, {}, tokenizer.eos_ids, tokenizer.config | dict.fromkeys(tokens._PRIVATE, "/home/somebody")
    )
    async with serve([toys.EOS_ID], tokenizer=tokenizer) as served:
        status, info = await served.get("/tokenizer_info")
        assert status == 200
        assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")  # one was an object
        assert (info["chat_template"], info["eos_token_ids"]) == (toys.CHATML, [toys.EOS_ID])
        assert info["tokenizer_class"] and "/home" not in str(info)
