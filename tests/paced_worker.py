"""A real `Worker`, with its thread and links, over an engine whose steps sleep: what is measured or
killed around it is the serving side alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from polypath.actors.place import Place
from polypath.actors.worker import Worker
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine, StepSize
from polypath.runtime.errors import QueueFullError
from polypath.runtime.planning.features import FEATURES
from polypath.runtime.request import FinishReason, Request, RequestOutput, StepCount
from polypath.runtime.speeds import Speeds


@dataclass(slots=True)
class _Row:
    request: Request
    num_done: int


@dataclass(frozen=True, slots=True)
class _Pages:
    num_free: int = 1000


class PacedEngine:
    """Every step takes `step_s` seconds and gives each running request its next token: `says`, over
    and over.
    """

    def __init__(self, says: list[int], step_s: float, *, max_num_seqs: int, max_waiting: int):
        self.pages = _Pages()
        self.last_step = StepSize(num_tokens=0, is_decode=False, seconds=0.0)
        self.generation_tokens = 0
        self.first_token_s = 0.0  # of the monotonic clock: when the last request got its first one
        self.step_cpu_s = 0.0  # of this pretence itself, which no figure should contain
        self._says = says
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._limit = max_num_seqs + max_waiting
        self._inbox: deque[Request | str] = deque()
        self._known: set[str] = set()
        self._rows: dict[str, _Row] = {}
        self._next_s = 0.0
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        if len(self._known) >= self._limit:
            raise QueueFullError(f"{len(self._known)} requests run or wait; try again later", 1.0)
        self._known.add(request.id)
        self._inbox.append(request)

    def cancel(self, request_id: str) -> None:
        if request_id in self._known:
            self._inbox.append(request_id)

    def knows(self, request_id: str) -> bool:
        return request_id in self._known

    def has_work(self) -> bool:
        return bool(self._inbox) or bool(self._rows)

    def step(self) -> list[RequestOutput]:
        """Sleeps until the beat of its clock, so that the cost of serving does not slow it."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._step_s, now_s)
        time.sleep(max(0.0, self._next_s - now_s))
        began_s = time.thread_time()
        outputs = self._cancelled_and_new()
        for row in list(self._rows.values())[: self._max_num_seqs]:
            outputs.append(self._token(row))
        self.last_step = StepSize(num_tokens=len(outputs), is_decode=True, seconds=self._step_s)
        self.step_cpu_s += time.thread_time() - began_s
        return outputs

    def _cancelled_and_new(self) -> list[RequestOutput]:
        ended: list[RequestOutput] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._rows[item.id] = _Row(item, len(item.output_ids))
            elif (row := self._rows.pop(item, None)) is not None:
                self._known.discard(item)
                ended.append(_output(row, (), FinishReason.CANCELLED))
        return ended

    def _token(self, row: _Row) -> RequestOutput:
        token = self._says[row.num_done % len(self._says)]
        limit = row.request.sampling.max_tokens or 16
        is_last = row.num_done + 1 >= limit
        if not row.num_done:
            self.first_token_s = time.monotonic()
        output = _output(row, (token,), FinishReason.LENGTH if is_last else None)
        row.num_done += 1
        self.generation_tokens += 1
        if is_last:
            del self._rows[row.request.id]
            self._known.discard(row.request.id)
        return output

    def num_running(self) -> int:
        return min(len(self._rows), self._max_num_seqs)

    def num_waiting(self) -> int:
        return len(self._known) - self.num_running()

    def num_queued_tokens(self) -> int:
        return 0

    def stats(self) -> dict[str, object]:
        return {
            "running": self.num_running(),
            "waiting": self.num_waiting(),
            "generation_tokens_total": self.generation_tokens,
            "kv_pages_used": len(self._rows),
            "kv_pages_total": 1000,
            "step_cpu_s": self.step_cpu_s,
        }


class PacedWorker(Worker):
    """Says what it is told to, a token for each request every `step_s` seconds."""

    def __init__(
        self,
        says: list[int],
        step_s: float = 0.02,
        *,
        model: str = "tiny",
        max_num_seqs: int = 8,
        max_waiting: int = 8,
        place: Place | None = None,
        features: list[str] | None = None,
    ) -> None:
        super().__init__(EngineConfig(model=model, served_model_name=model), place)
        self._step_s = step_s
        self._features = FEATURES if features is None else features
        self._limits = {"max_num_seqs": max_num_seqs, "max_waiting": max_waiting}
        self.paced = PacedEngine(says, step_s, **self._limits)

    def start(self, on_progress: object = None) -> None:
        self.adopt(cast("Engine", self.paced))

    def _speeds(self) -> dict[str, Any]:  # JSON
        steps = ((1, self._step_s), (self._limits["max_num_seqs"], self._step_s))
        return Speeds(prefill_tokens_s=1e6, step_s=steps).to_json()

    def describe(self) -> dict[str, Any]:
        return {
            "worker_id": self.worker_id,
            "model": self.config.served_model_name,
            "max_model_len": 8192,
            "vocab_size": 100_000,
            "fingerprint": "pp-paced",
            "path": {"prefill": "paced", "decode": "paced"},
            "plan": {"device": "cpu"},
            "calibration": {"concurrency": self._limits["max_num_seqs"], "speeds": self._speeds()},
            "features": list(self._features),
            "pid": os.getpid(),
            **self.place.to_json(),
            **self._limits,
        }


def _output(row: _Row, ids: tuple[int, ...], reason: FinishReason | None) -> RequestOutput:
    steps = (StepCount(mode="decode", runner="paced", reason="planned", steps=row.num_done + 1),)
    return RequestOutput(
        request_id=row.request.id,
        position=row.num_done,
        token_ids=ids,
        finish_reason=reason,
        steps=steps if reason is not None else (),
    )
