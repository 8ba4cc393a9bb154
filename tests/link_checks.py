"""What every link to a worker must do, whatever it is made of.

The worker behind it has a tiny random model: 260 ids, two requests run, two wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count

import pytest

from polypath.actors.link import WorkerLink
from polypath.runtime.errors import ContextLengthError, QueueFullError, RequestError
from polypath.runtime.request import FinishReason, Request, RequestOutput, SamplingParams

Check = Callable[[WorkerLink], Awaitable[None]]
CHECKS: list[Check] = []
_numbers = count()


def check(function: Check) -> Check:
    """Adds it to what the tests of each link run."""
    CHECKS.append(function)
    return function


def name_of(function: Check) -> str:
    """For test ids."""
    return getattr(function, "__name__", "?")


def ask(num_tokens: int = 8, **sampling: object) -> Request:
    """A greedy request that does not stop by itself."""
    params: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    return Request(
        id=f"check-{next(_numbers)}",
        prompt_ids=(5, 6, 7, 8),
        sampling=SamplingParams(**(params | sampling)),  # type: ignore[arg-type]  # by name
    )


async def read(link: WorkerLink, request: Request, limit: int | None = None) -> list[RequestOutput]:
    """All outputs, or the first `limit`."""
    seen: list[RequestOutput] = []
    async with asyncio.timeout(60), aclosing(link.generate(request)) as outputs:
        async for output in outputs:
            seen.append(output)
            if len(seen) == limit:
                break
    return seen


def ids(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of some outputs."""
    return [token_id for output in outputs for token_id in output.token_ids]


async def until_idle(link: WorkerLink) -> None:
    """Wait until the worker runs and queues nothing."""
    async with asyncio.timeout(30):
        while True:
            stats = await link.stats()
            if not stats["running"] and not stats["waiting"]:
                return
            await asyncio.sleep(0.02)


@check
async def every_token_comes_once_and_in_order(link: WorkerLink) -> None:
    request = ask(20)
    outputs = await read(link, request)
    assert [output.position for output in outputs] == list(range(20))
    assert all(output.request_id == request.id for output in outputs)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert sum(step.steps for step in outputs[-1].steps) == 20


@check
async def many_requests_share_a_link(link: WorkerLink) -> None:
    alone = ids(await read(link, ask(12)))
    together = await asyncio.gather(*(read(link, ask(12)) for _ in range(4)))
    assert [ids(outputs) for outputs in together] == [alone] * 4


@check
async def a_request_resumes_at_its_next_token(link: WorkerLink) -> None:
    whole = ids(await read(link, ask(12)))
    resumed = replace(ask(12), output_ids=tuple(whole[:5]))
    outputs = await read(link, resumed)
    assert outputs[0].position == 5
    assert whole[:5] + ids(outputs) == whole


@check
async def log_probabilities_come_along(link: WorkerLink) -> None:
    outputs = await read(link, ask(3, logprobs=2, prompt_logprobs=1))
    assert all(len(output.logprobs) == 1 for output in outputs)
    assert len(outputs[1].logprobs[0].top) == 2
    first = outputs[0].prompt_logprobs
    assert first is not None and first[0] is None
    assert [entry.token_id for entry in first[1:] if entry] == [6, 7, 8]


@check
async def closing_early_frees_the_worker(link: WorkerLink) -> None:
    await asyncio.gather(*(read(link, ask(400), limit=2) for _ in range(4)))
    await until_idle(link)


@check
async def an_id_may_come_again_once_its_stream_is_closed(link: WorkerLink) -> None:
    request = ask(300)
    for _ in range(3):
        assert len(await read(link, request, limit=2)) == 2
    await until_idle(link)


@check
async def a_cancelled_request_ends_with_its_counts(link: WorkerLink) -> None:
    request = ask(400)
    last: RequestOutput | None = None
    async with asyncio.timeout(60), aclosing(link.generate(request)) as outputs:
        async for output in outputs:
            if last is None:
                await link.cancel(request.id)
            last = output
    assert last is not None
    assert last.finish_reason is FinishReason.CANCELLED
    assert last.steps


@check
async def cancelling_what_is_unknown_is_nothing(link: WorkerLink) -> None:
    await link.cancel("nobody")
    assert len(await read(link, ask(2))) == 2


@check
async def a_wrong_request_names_its_field(link: WorkerLink) -> None:
    with pytest.raises(RequestError, match="token id 99999") as caught:
        await read(link, replace(ask(), prompt_ids=(99999,)))
    assert caught.value.param == "prompt"


@check
async def a_long_prompt_is_a_context_length_error(link: WorkerLink) -> None:
    with pytest.raises(ContextLengthError) as caught:
        await read(link, replace(ask(), prompt_ids=(5,) * 9000))
    assert caught.value.code == "context_length_exceeded"


@check
async def a_full_queue_says_when_to_come_back(link: WorkerLink) -> None:
    async with asyncio.timeout(60):
        while (refusal := await refusal_of_a_fifth(link)) is None:
            pass  # the engine was faster than the questions: one of the four had ended
    assert "the limit is 4" in str(refusal)
    assert refusal.retry_after_s >= 1.0


async def refusal_of_a_fifth(link: WorkerLink) -> QueueFullError | None:
    """Fill the queue with four requests and send another; None where it was taken."""
    streams = [link.generate(ask(400)) for _ in range(4)]
    readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
    try:
        for _ in range(50):
            await asyncio.sleep(0.001)  # the readers begin
            stats = await link.stats()
            if stats["running"] + stats["waiting"] == 4:
                break
        await read(link, ask(), limit=1)
    except QueueFullError as error:
        return error
    finally:
        for reader, stream in zip(readers, streams, strict=True):
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await stream.aclose()
        await until_idle(link)
    return None


@check
async def an_id_in_use_is_refused(link: WorkerLink) -> None:
    request = ask(400)
    async with asyncio.timeout(60), aclosing(link.generate(request)) as outputs:
        await anext(outputs)
        with pytest.raises(RequestError, match="running already"):
            await read(link, request)
    await until_idle(link)


@check
async def a_worker_that_is_held_says_so_and_goes_on(link: WorkerLink) -> None:
    for is_held in (True, False):
        await link.hold(is_held)
        load = link.load()
        assert load is not None and load.is_held == is_held
        assert len(await read(link, ask(2))) == 2, "who has not heard it may still come"
        load = link.load()
        assert load is not None and load.is_held == is_held


@check
async def the_worker_says_what_it_is_and_how_it_fares(link: WorkerLink) -> None:
    await read(link, ask(6))
    said, stats = await link.describe(), await link.stats()
    assert said["worker_id"] == stats["worker_id"]
    assert said["max_num_seqs"] == 2
    load = link.load()
    assert load is not None
    assert load.decode_tokens_s > 0 and load.prefill_tokens_s > 0 and load.step_s > 0
    assert load.kv_pages_free > 0
