"""The asyncio front: same tokens as a batch job, arrivals at any time, cancellation that frees pages."""

import asyncio

import pytest
import toy

import kvjax
from kvjax.async_llm import AsyncLLM
from kvjax.errors import RequestError
from kvjax.plans import Options


class Tokenizer:
    """Token ids in, one character a token out."""

    strips_space = False

    def encode(self, text):
        return [ord(c) % toy.VOCAB for c in text]


def toy_llm(**options) -> kvjax.LLM:
    options = {"slots": 4, "rows": 4, "packed": 32, "kv_bytes": 16 * 4 * 64, **options}
    return kvjax.LLM(toy.model(), Tokenizer(), Options(**options))  # type: ignore[arg-type]


def text(tokens) -> str:
    return bytes(tokens).decode()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_many_at_once_get_the_tokens_of_a_batch_job():
    prompts = [list(range(1, 2 + i)) for i in range(12)]

    async def ask():
        async with AsyncLLM(toy_llm(), max_length=60, segment_seconds=0.02) as llm:
            return await asyncio.gather(*(llm.generate(p, max_new_tokens=10 + i) for i, p in enumerate(prompts)))

    for i, (prompt, completion) in enumerate(zip(prompts, run(ask()), strict=True)):
        assert list(completion.tokens) == toy.continuation(prompt, 10 + i)
        assert completion.finish_reason == "length" and completion.prompt_tokens == tuple(prompt)


def test_streams_join_the_running_batch_and_share_prefixes():
    shared = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]

    async def ask():
        async with AsyncLLM(toy_llm(), max_length=60, segment_seconds=0.02) as llm:
            first = llm.stream(shared, max_new_tokens=40)
            pieces = [await anext(first)]
            late = await llm.generate([*shared, 7], max_new_tokens=5)
            apart = await llm.generate([*shared, 7], max_new_tokens=5, cache_salt="other")
            pieces += [piece async for piece in first]
            return pieces, late, apart

    pieces, late, apart = run(ask())
    assert "".join(pieces) == text(toy.continuation(shared, 40)) and len(pieces) > 1
    assert list(late.tokens) == list(apart.tokens) == toy.continuation([*shared, 7], 5)
    assert late.samples[0].cached_tokens == 16 and apart.samples[0].cached_tokens == 0


def test_samples_of_one_prompt():
    async def ask():
        async with AsyncLLM(toy_llm(), max_length=60) as llm:
            return await llm.generate([5, 6, 7], max_new_tokens=6, n=3)

    assert [list(s.tokens) for s in run(ask()).samples] == [toy.continuation([5, 6, 7], 6)] * 3


def test_cancelling_frees_slots_and_pages():
    """One slot: the second request can only run when the first is cancelled."""

    async def ask():
        async with AsyncLLM(toy_llm(slots=1), max_length=4000, segment_seconds=0.02) as llm:
            endless = asyncio.create_task(llm.generate([1, 2, 3], max_new_tokens=200))
            stream = llm.stream([1, 2], max_new_tokens=150)
            await asyncio.sleep(0.1)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            await anext(stream)
            await stream.aclose()
            last = await llm.generate([9], max_new_tokens=3)
            state = llm._job.state
            assert state is not None
            return last, int(state.cache.groups[0].pool.height), int(state.cache.groups[0].pool.refs.max())

    last, free, owners = run(ask())
    assert list(last.tokens) == toy.continuation([9], 3)
    assert owners <= 1  # what is not free is only in the prefix index
    assert free > 0


def test_refuses_at_once_and_goes_on():
    async def ask():
        async with AsyncLLM(toy_llm(), max_length=20) as llm:
            with pytest.raises(RequestError, match="exceed the context of 20 tokens"):
                await llm.generate([1] * 15, max_new_tokens=10)
            with pytest.raises(RequestError, match="a stream has one sample"):
                llm.stream([1], max_new_tokens=4, n=2)
            return await llm.generate([4], max_new_tokens=4)

    assert list(run(ask()).tokens) == toy.continuation([4], 4)
    with pytest.raises(RequestError, match="max_length is 5000: give 2 to 4096"):
        AsyncLLM(toy_llm(), max_length=5000)


def test_closing_ends_what_runs():
    async def ask():
        llm = AsyncLLM(toy_llm(), max_length=4000, segment_seconds=0.02)
        task = asyncio.create_task(llm.generate([1, 2, 3], max_new_tokens=200))
        stream = llm.stream([1], max_new_tokens=100)
        await anext(stream)
        await llm.close()
        with pytest.raises(RuntimeError, match="AsyncLLM was closed"):
            await task
        await stream.aclose()

    run(ask())
