"""One model as a gateway serves it: its text parts, its workers and pools, and its queue."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from .answer_length import AnswerLength
from .pool_memory import PoolBook, PoolMemory
from .prompts import PromptReader
from .router import RoutingRules
from .served_worker import Worker
from .waiting import Limits, Line

FIRST_CAPACITY = 256  # requests of a worker nobody has seen yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Asleep:
    """What holds for a model while it has no worker, but can get one."""

    wake_s: float  # until a worker that is wanted answers, as stated
    max_model_len: int
    vocab_size: int
    capacity: int = FIRST_CAPACITY


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """A model name with its text parts and the workers that serve it."""

    name: str
    prompts: PromptReader
    facts: tuple[str, ...] = ()  # one-line facts about tokenizer and template
    created: int = field(default_factory=lambda: int(time.time()))
    workers: dict[str, Worker] = field(default_factory=dict)  # by worker id
    rules: RoutingRules = field(default_factory=RoutingRules)
    limits: Limits = field(default_factory=Limits)  # of its queue
    lengths: AnswerLength = field(default_factory=AnswerLength)
    asleep: Asleep | None = None  # None: it cannot be woken
    pools: tuple[PoolMemory, ...] = ()  # all that it may have workers of, where that is known
    last_speeds: dict[str, tuple[float, float]] = field(default_factory=dict)  # by pool
    line: Line = field(init=False)
    _book: PoolBook = field(init=False)

    def __post_init__(self) -> None:
        self._book = PoolBook(self.workers, self.pools, self.rules.prefer)
        self.line = Line(self.workers, self.limits, self._book)

    @property
    def max_model_len(self) -> int:
        """Tokens of the largest context among the workers, and pools that have none now; without
        both as `asleep` says, else 0.
        """
        found = [worker.max_model_len for worker in self.workers.values()]
        if self.workers or self.asleep:  # else nothing is served
            found += [pool.context for pool in self._book.sleeping()]
        return max(found, default=self.asleep.max_model_len if self.asleep else 0)

    @property
    def vocab_size(self) -> int:
        """Token ids that every worker knows; while there is none, as `asleep` says, else 0."""
        found = (worker.vocab_size for worker in self.workers.values())
        return min(found, default=self.asleep.vocab_size if self.asleep else 0)

    @property
    def capacity(self) -> int:
        """Requests that the roomiest worker runs and queues at most."""
        found = [worker.capacity for worker in self.workers.values()]
        if self.workers:
            lasts = (pool.last for pool in self._book.sleeping())
            found += [FIRST_CAPACITY if last is None else last.capacity for last in lasts]
        return max(found, default=self.asleep.capacity if self.asleep else 0)

    def met(self, worker: Worker) -> None:
        """Remember how a worker was, for the time when there is none."""
        is_current = self._book.met(worker)
        if is_current and self.asleep is not None:
            self.asleep = replace(
                self.asleep,
                max_model_len=worker.max_model_len,
                vocab_size=worker.vocab_size,
                capacity=worker.capacity,
            )
            self.line.asleep_queue = worker.max_waiting

    def recall(self, worker: Worker, speeds: tuple[float, float]) -> None:
        """Remember a worker that another gateway met, and how fast its pool was."""
        self.met(worker)
        if any(speeds):
            self.last_speeds.setdefault(worker.pool, speeds)
        self.line.changed()

    def pool_speeds(self, pool: str) -> tuple[float, float]:
        """Prefill and decode tokens a second of one worker of the pool with as many requests at
        once as suit it, lately or when there was one last; 0.0 unknown.
        """
        known = [w for w in self.workers.values() if w.pool == pool and w.speeds.prefill_tokens_s]
        if known:
            prefill = sum(worker.speeds.prefill_tokens_s for worker in known) / len(known)
            decode = sum(w.speeds.decode_tokens_s(w.concurrency) for w in known) / len(known)
            self.last_speeds[pool] = (prefill, decode)
        return self.last_speeds.get(pool, (0.0, 0.0))
