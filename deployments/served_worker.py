"""A worker as a gateway sees it: its link, what it said of itself, and what we gave it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..runtime.planning.features import FEATURES
from ..runtime.speeds import Speeds

if TYPE_CHECKING:
    from ..actors.link import WorkerLink
    from ..actors.load import WorkerLoad

FRESH_S = 0.5  # a load that has not changed for longer says nothing of other gateways' requests
CLASS_FIELDS = (
    "model",
    "linear_method",
    "quantization",
    "dtype",
    "kv_dtype",
    "batch_invariant",
)
"""Workers that agree in these continue each other's answers as if nothing had happened."""


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One engine request that a worker has, or is about to get, from this gateway."""

    worker: Worker
    num_uncomputed: int  # tokens to run before its next token, until that came
    num_expected: int  # tokens it will likely still generate when it starts
    num_received: int = 0
    is_bound: bool = False  # not every pool of the model could serve it
    is_ended: bool = False

    def received(self, num_tokens: int) -> None:
        """Tokens of it have come."""
        self.num_received += num_tokens
        self.num_uncomputed = 0

    @property
    def num_left(self) -> int:
        """Tokens it will likely still generate: longer than expected is likely to go on."""
        return max(self.num_expected - self.num_received, 1 + self.num_received // 4)

    def end(self) -> None:
        """The worker has it no more; a second time is nothing."""
        self.is_ended = True
        self.worker.jobs.discard(self)


@dataclass(kw_only=True, slots=True, eq=False)
class Worker:
    """One per link and life: a worker that comes back is a new one, and may be tried again."""

    link: WorkerLink
    id: str
    model: str
    fingerprint: str
    max_model_len: int  # tokens
    vocab_size: int
    capacity: int  # requests it runs and queues at most
    paths: dict[str, str]  # mode -> name of the planned path
    description: dict[str, Any]  # JSON: everything else, for /v1/paths
    pool: str = ""
    edition: str = ""  # of its pool's options; empty: it did not say
    labels: dict[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset(FEATURES)
    is_batch_invariant: bool = False
    max_num_seqs: int = 1
    concurrency: int = 1  # requests at once beyond which it gets slower, not faster
    speeds: Speeds = field(default_factory=Speeds)
    jobs: set[Job] = field(default_factory=set)
    is_leaving: bool = False  # it ends: nothing new
    closed_until_s: float = 0.0  # of the loop's clock: it refused or failed a moment ago
    _load: WorkerLoad | None = None
    _load_since_s: float = 0.0

    @classmethod
    def of(cls, link: WorkerLink, said: Mapping[str, Any]) -> Worker:  # JSON
        """From what a worker answers to `describe`."""
        calibration = said.get("calibration") or {}
        return cls(
            link=link,
            id=said["worker_id"],
            model=said["model"],
            fingerprint=said["fingerprint"],
            max_model_len=_context(said),
            vocab_size=said["vocab_size"],
            capacity=said["max_num_seqs"] + said["max_waiting"],
            paths=dict(said["path"]),
            description=dict(said),
            pool=said.get("pool") or "",
            edition=said.get("edition") or "",
            labels=dict(said.get("labels") or {}),
            features=frozenset(said.get("features", FEATURES)),
            is_batch_invariant=bool(said.get("batch_invariant")),
            max_num_seqs=said["max_num_seqs"],
            concurrency=calibration.get("concurrency") or said["max_num_seqs"],
            speeds=Speeds.from_json(calibration.get("speeds")),
        )

    @property
    def is_draining(self) -> bool:
        """Whether nothing new may be sent to it: it leaves, or an operator holds it."""
        load = self.link.load()
        return self.is_leaving or (load is not None and load.is_held)

    @property
    def path_header(self) -> str:
        """The planned path; where modes differ, each with its own."""
        if len(set(self.paths.values())) == 1:
            return next(iter(self.paths.values()))
        return ", ".join(f"{mode}={name}" for mode, name in self.paths.items())

    @property
    def max_waiting(self) -> int:
        """Requests that its own queue would hold."""
        return self.capacity - self.max_num_seqs

    @property
    def num_in_flight(self) -> int:
        """Requests of this gateway that it runs or queues."""
        return len(self.jobs)

    def plan_value(self, name: str) -> object:
        """A field of its plan, None where it did not say."""
        return (self.description.get("plan") or {}).get(name)

    @property
    def resume_class(self) -> tuple[object, ...]:
        """What must be equal for an answer to go on unchanged."""
        plan = self.description.get("plan") or {}
        values = {**plan, "batch_invariant": self.is_batch_invariant}
        return tuple(values.get(name) for name in CLASS_FIELDS)

    def observe(self, stats: Mapping[str, Any]) -> None:  # JSON
        """Take over the speeds of a stats answer, which live steps keep true."""
        if stats.get("speeds"):
            self.speeds = Speeds.from_json(stats["speeds"])

    def load(self, now_s: float) -> WorkerLoad | None:
        """The latest load, while it is fresh: a worker that does nothing has nothing to say."""
        load = self.link.load()
        if load is not self._load:
            self._load, self._load_since_s = load, now_s
        return load if now_s - self._load_since_s < FRESH_S else None

    def close_for(self, seconds: float) -> None:
        """Send it nothing for a while: its queue is full, or its last stream broke."""
        until_s = asyncio.get_running_loop().time() + seconds
        self.closed_until_s = max(self.closed_until_s, until_s)

    def num_busy(self, now_s: float) -> int:
        """Requests that it runs or queues, other gateways' included as far as is known."""
        load = self.load(now_s)
        return len(self.jobs) if load is None else max(len(self.jobs), load.running + load.waiting)


def _context(said: Mapping[str, Any]) -> int:  # JSON
    """Tokens of the longest request: the context, or the whole KV pool where that is smaller."""
    plan = said.get("plan") or {}
    pages = int(plan.get("num_pages") or 0) - 1  # page 0 is scratch
    page_size = int(plan.get("page_size") or 0)
    limit = int(said["max_model_len"])
    return min(limit, pages * page_size) if pages > 0 and page_size else limit
