"""A link closes what nobody reads any more, and hands on errors as the worker raised them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from polypath.actors.handle_link import _as_ours
from polypath.actors.link import LocalLink
from polypath.runtime.errors import EngineError, QueueFullError, RequestError
from polypath.runtime.request import FinishReason, Request, RequestOutput


class PacedWorker:
    """Says one token after the other until it is cancelled or has said `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.cancelled: list[str] = []

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        for position in range(self.num_tokens):
            await asyncio.sleep(0)
            last = position == self.num_tokens - 1
            yield RequestOutput(
                request_id=request.id,
                position=position,
                token_ids=(position,),
                finish_reason=FinishReason.LENGTH if last else None,
            )

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


# Importing Serve builds its schemas in a way that pydantic calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

REQUEST = Request(id="r1", prompt_ids=(1,))


async def read(worker: PacedWorker, num_items: int) -> int:
    """Read that many items, then close."""
    stream = LocalLink(worker).generate(REQUEST)  # type: ignore[arg-type]  # a stand-in
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == num_items:
            break
    await stream.aclose()
    return seen


def test_a_stream_read_to_its_end_is_not_cancelled() -> None:
    worker = PacedWorker(3)
    assert asyncio.run(read(worker, 10)) == 3
    assert worker.cancelled == []


def test_closing_early_cancels_the_request() -> None:
    worker = PacedWorker(3)
    assert asyncio.run(read(worker, 1)) == 1
    assert worker.cancelled == ["r1"]


def test_rays_wrapping_is_undone_with_all_fields() -> None:
    ray = pytest.importorskip("ray.exceptions")
    inner = RequestError("n is 0; it must be at least 1", "n", "bad_n")
    wrapped = ray.RayTaskError("generate", "traceback", inner).as_instanceof_cause()
    assert _as_ours(wrapped) is inner
    full = QueueFullError("full", retry_after_s=7.5)
    assert _as_ours(full) is full


def test_a_dead_worker_is_an_engine_error() -> None:
    ray = pytest.importorskip("ray.exceptions")
    error = _as_ours(ray.ActorDiedError())
    assert isinstance(error, EngineError)
    assert "the worker died or cannot be reached (ActorDiedError)" in str(error)
