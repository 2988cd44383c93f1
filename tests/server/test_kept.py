"""Responses as they are kept: by whom they can be referred to, how long, and what they hold on to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncllm.server.kept import PreviousNotFound, ResponseNotFound, Responses
from asyncllm.server.settings import Settings
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.wire.response_events import SocketFrames
from asyncllm.wire.responses import ResponseRequest

from ..fakes import scripted, scripted_llm
from ..text import toys


class Sink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.framing = SocketFrames(None)
        self.data, self.is_over = b"", False
        self.outflow = None

    def give_patience(self, num_unread_bytes: int) -> None:
        raise AssertionError("there was room")

    def write(self, data: bytes) -> None:
        self.data += data

    def end(self, data: bytes) -> None:
        assert not self.is_over
        self.data, self.is_over = self.data + data, True

    def replaced(self) -> None:
        raise AssertionError("nobody else came")

    def cut_off(self) -> None:
        raise AssertionError("nothing was wrong")


@asynccontextmanager
async def responses(tokenizer: Tokenizer, settings: Settings) -> AsyncIterator[Responses]:
    next_token = scripted(tokenizer.encode("Hello."), toys.EOS_ID)
    async with scripted_llm(tokenizer, ChatTemplate(toys.CHATML), next_token) as (llm, _):
        yield Responses(llm, settings)


async def ended(responses: Responses, owner: object = None, **fields: object) -> str:
    live = await responses.start(ResponseRequest(input="hi", **fields), owner)  # type: ignore[arg-type]
    await asyncio.wait([live.over])
    return live.id


async def goes_on(responses: Responses, previous: str, owner: object = None) -> bool:
    try:
        await ended(responses, owner, previous_response_id=previous, store=False)
    except PreviousNotFound:
        return False
    return True


async def test_a_late_follower_hears_all_and_is_not_held_on_to(tokenizer: Tokenizer) -> None:
    async with responses(tokenizer, Settings()) as kept:
        live = kept.get(await ended(kept))
        first, second = Sink(), Sink()
        live.attach(first)
        live.attach(second)  # would call first.replaced(), were it still there
        assert first.data == second.data and first.is_over and second.is_over
        assert b"Hello" in first.data and live._sink is live._script is None


async def test_what_is_not_stored_is_its_owners_until_he_goes(tokenizer: Tokenizer) -> None:
    async with responses(tokenizer, Settings()) as kept:
        mine, other = object(), object()
        name = await ended(kept, mine, store=False)
        assert await goes_on(kept, name, mine)
        assert not await goes_on(kept, name, other) and not await goes_on(kept, name)
        with pytest.raises(ResponseNotFound):
            kept.get(name)
        stored = await ended(kept, mine)
        kept.disown(mine)
        kept.disown(other)
        assert not await goes_on(kept, name, mine) and await goes_on(kept, stored, other)
        kept.disown(other)
        assert set(kept._by_id) == set(kept._ended) == {stored} and kept._owned == {}
        assert kept._num_bytes == kept.get(stored).num_bytes


async def test_what_is_resumable_outlives_its_owner_by_the_grace(tokenizer: Tokenizer) -> None:
    async with responses(tokenizer, Settings(resume_grace_s=1000)) as kept:
        mine = object()
        name = await ended(kept, mine, store=False, resumable=True)
        until_s = kept._ended[name][0]
        kept.disown(mine)
        assert kept.get(name).id == name and not await goes_on(kept, name, mine)
        assert kept._ended[name][0] > until_s  # the grace, and no more the retention time, which is shorter here
        assert kept._num_bytes == kept.get(name).num_bytes


async def test_the_shorter_kept_goes_first_whatever_ended_before_it(tokenizer: Tokenizer) -> None:
    async with responses(tokenizer, Settings(resume_grace_s=1e-9)) as kept:
        stored = await ended(kept)
        passing = await ended(kept, store=False, resumable=True)
        with pytest.raises(ResponseNotFound):
            kept.get(passing)
        kept.get(stored)
        kept.forget(kept.get(stored))
        assert kept._by_id == kept._ended == {} and kept._num_bytes == 0


async def test_one_owner_going_late_disturbs_nobody(tokenizer: Tokenizer) -> None:
    """What is let go while its owner goes includes its own, whose time is over: none of them is stumbled over."""
    async with responses(tokenizer, Settings(retention_s=0.05, resume_grace_s=0.05)) as kept:
        owner = object()
        for _ in range(3):
            await ended(kept, owner, store=False, resumable=True)
        await asyncio.sleep(0.1)
        kept.disown(owner)
        for _ in range(3):
            await ended(kept)
        await asyncio.sleep(0.1)
        with pytest.raises(ResponseNotFound):
            kept.get("resp_x")
        assert repr(kept) == "Responses(0, 0 ended, 0 bytes)" and kept._owned == {}


async def test_one_too_large_to_keep_takes_nobodys_place(tokenizer: Tokenizer) -> None:
    async with responses(tokenizer, Settings(max_retained_bytes=10_000)) as kept:
        small = [await ended(kept) for _ in range(3)]
        large = await ended(kept, metadata={f"key{i}": "x" * 500 for i in range(16)})
        assert [kept.get(response_id).id for response_id in small] == small
        with pytest.raises(ResponseNotFound):
            kept.get(large)


@pytest.mark.parametrize("stored", [True, False])
async def test_what_is_resumable_has_its_grace_however_briefly_others_are_kept(
    tokenizer: Tokenizer, stored: bool
) -> None:
    async with responses(tokenizer, Settings(retention_s=0, resume_grace_s=30)) as kept:
        response_id = await ended(kept, object(), store=stored, resumable=True)
        assert kept.get(response_id).outcome is not None
