"""A worker of a stated speed: each step sleeps. It stands for unequal machines, in tests only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from polypath.actors.load import WorkerLoad
from polypath.runtime.errors import EngineError, QueueFullError
from polypath.runtime.request import FinishReason, Request, RequestOutput, StepCount
from polypath.runtime.speeds import Speeds

StepTime = Callable[[int], float]  # rows -> seconds of a decode step


def token_of(request: Request, position: int) -> int:
    """The token that any paced worker says at a position; depends on prompt, seed and choice."""
    sampling = request.sampling
    key = (request.prompt_ids, sampling.seed, sampling.choice, position)
    return 4 + hash(key) % 250


class _Running:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_done = len(request.output_ids)
        self.outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.is_computed = False

    @property
    def num_uncomputed(self) -> int:
        return 0 if self.is_computed else len(self.request.prompt_ids) + self.num_done


class PacedLink:
    """A link to a worker in this process; runs `max_num_seqs` requests, queues `max_waiting`."""

    kind = "local"

    def __init__(
        self,
        worker_id: str,
        step_s: float | StepTime = 0.01,
        *,
        prefill_tokens_s: float = 10_000.0,
        max_num_seqs: int = 8,
        max_waiting: int = 64,
        max_model_len: int = 4096,
        is_calibrated: bool = True,
        **described: Any,
    ) -> None:
        self.worker_id = worker_id
        self._step_s = step_s if callable(step_s) else lambda rows: step_s
        self._prefill_tokens_s = prefill_tokens_s
        self.max_num_seqs = max_num_seqs
        self.max_waiting = max_waiting
        self.max_model_len = max_model_len
        self.is_calibrated = is_calibrated
        self.described = described
        self.requests: list[Request] = []
        self.num_tokens = 0  # generated here
        self.peak = 0  # requests at once
        self.is_dead = False
        self.is_stalled = False
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._engine: asyncio.Task[None] | None = None

    async def describe(self) -> dict[str, Any]:
        rows = [1, max(1, self.max_num_seqs // 2), self.max_num_seqs]
        speeds = Speeds(
            prefill_tokens_s=self._prefill_tokens_s,
            step_s=tuple((n, self._step_s(n)) for n in sorted(set(rows))),
        )
        calibration = {"concurrency": self.max_num_seqs, "speeds": speeds.to_json()}
        path = {"runner": "eager", "attention_backend": "paced", "ops": "paced"}
        return {
            "worker_id": self.worker_id,
            "model": "tiny",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_waiting": self.max_waiting,
            "vocab_size": 260,
            "fingerprint": f"pp-{self.worker_id}",
            "path": {"prefill": "eager+paced+paced", "decode": "eager+paced+paced"},
            "plan": {"device": "cpu", "paths": {"decode": path, "prefill": path}},
            "calibration": calibration if self.is_calibrated else None,
        } | self.described

    async def stats(self) -> dict[str, Any]:
        self._require_alive()
        while self.is_stalled:
            await asyncio.sleep(0.1)
        return {
            "worker_id": self.worker_id,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "heartbeat_age_s": 0.0,
        }

    def load(self) -> WorkerLoad | None:
        return None

    async def hold(self, is_held: bool) -> None:
        raise AssertionError("no test holds a paced worker")

    async def cancel(self, request_id: str) -> None:
        for each in [*self._waiting, *self._running]:
            if each.request.id == request_id:
                self._end(each, FinishReason.CANCELLED)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self._require_alive()
        if self.num_held >= self.max_num_seqs + self.max_waiting:
            raise QueueFullError(f"{self.num_held} requests run or wait", 1.0)
        self.requests.append(request)
        mine = _Running(request)
        self._waiting.append(mine)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._drive())
        try:
            while True:
                item = await mine.outputs.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._drop(mine)

    @property
    def num_held(self) -> int:
        """Requests that run or wait here."""
        return len(self._running) + len(self._waiting)

    def kill(self) -> None:
        """As by SIGKILL: every stream breaks, nothing is answered any more."""
        self.is_dead = True
        for each in [*self._waiting, *self._running]:
            each.outputs.put_nowait(EngineError(f"{self.worker_id} died"))

    def stall(self, is_stalled: bool = True) -> None:
        """As by SIGSTOP, and SIGCONT with False."""
        self.is_stalled = is_stalled

    def drain(self) -> None:
        """Hand every stream over."""
        for each in [*self._waiting, *self._running]:
            self._end(each, FinishReason.MOVED)

    def _require_alive(self) -> None:
        if self.is_dead:
            raise EngineError(f"{self.worker_id} is dead")

    def _end(self, each: _Running, reason: FinishReason) -> None:
        self._say(each, [], reason)
        self._drop(each)

    def _drop(self, each: _Running) -> None:
        with suppress(ValueError):
            self._running.remove(each)
        with suppress(ValueError):
            self._waiting.remove(each)

    async def _drive(self) -> None:
        while self.num_held and not self.is_dead:
            while self.is_stalled:
                await asyncio.sleep(0.05)
            while self._waiting and len(self._running) < self.max_num_seqs:
                self._running.append(self._waiting.pop(0))
            self.peak = max(self.peak, len(self._running))
            new_tokens = sum(each.num_uncomputed for each in self._running)
            rows = list(self._running)
            await asyncio.sleep(new_tokens / self._prefill_tokens_s + self._step_s(len(rows)))
            while self.is_stalled:
                await asyncio.sleep(0.05)
            for each in rows:
                if each in self._running and not self.is_dead:
                    self._step(each)

    def _step(self, each: _Running) -> None:
        each.is_computed = True
        limit = each.request.sampling.max_tokens or 16
        token = token_of(each.request, each.num_done)
        self.num_tokens += 1
        is_last = each.num_done + 1 >= limit
        self._say(each, [token], FinishReason.LENGTH if is_last else None)
        if is_last:
            self._drop(each)

    def _say(self, each: _Running, ids: list[int], reason: FinishReason | None) -> None:
        steps = (StepCount(mode="decode", runner="eager", reason="planned", steps=1),)
        output = RequestOutput(
            request_id=each.request.id,
            position=each.num_done,
            token_ids=tuple(ids),
            finish_reason=reason,
            steps=steps if reason is not None else (),
        )
        each.num_done += len(ids)
        each.outputs.put_nowait(output)
