"""What one worker will do (`ExecutionPlan`): every path and value, and who asked for each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ConfigurationError
from ..forward_mode import ForwardMode
from .record import from_json, to_json
from .refusal import Refusal

SCHEMA = 1
Origin = Literal["user", "model", "hardware", "default"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPath:
    """How batches of one mode run."""

    mode: ForwardMode
    runner: str
    attention_backend: str
    ops: str

    @property
    def name(self) -> str:
        """Such as "eager+torch_sdpa+torch"."""
        return f"{self.runner}+{self.attention_backend}+{self.ops}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A candidate that was considered and refused, in one mode or (None) in all planned ones."""

    mode: ForwardMode | None
    kind: Literal["device", "dtype", "runner", "attention", "ops", "linear"]
    candidate: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on the plan's device. `limit_bytes` is what was free when probed; None is unknown."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int  # the larger of loading the largest tensor and of the largest step
    graph_bytes: int = 0  # captured graphs and the pools they run in
    reserve_bytes: int  # left to interpreter, torch, CUDA context and allocator slack
    total_bytes: int
    limit_bytes: int | None
    limit_origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMemory:
    """Bytes as they were once the worker had started."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int | None = None  # None: not measured
    activation_origin: str = "not measured"  # of what, or why not
    graph_bytes: int
    peak_bytes: int  # the most that was held at once so far
    peak_origin: str  # of what, and who counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEvent:
    """What became of the plan at start: a self-check, a rung of the ladder."""

    stage: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """One worker's plan. `to_json` has these fields in this order, plus `schema` and `fingerprint`.

    `num_pages` counts the scratch page 0; requests share the other pages. `rejected` names every
    candidate that was refused. `origins` says for each value who asked for it.
    """

    hardware: str  # name of the node's hardware
    software: str  # found there, or assumed by a profile
    model: str  # family, shape and stored dtype
    device: str
    device_name: str
    dtype: str  # of weights and activations
    kv_dtype: str
    page_size: int  # tokens
    linear_method: str
    quantization: str  # int8 or int4: what weights of more bits are rounded to; stored: nothing
    paths: dict[ForwardMode, ExecutionPath]
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    num_pages: int
    kv_bytes: int
    prefix_cache: bool
    memory: MemoryEstimate
    num_threads: int
    native_kernels: str | None = None  # build of kernels/cpu that some candidate uses
    flash_attn_library: str | None = None  # as asked: a file with FlashAttention
    capture_sizes: tuple[int, ...] = ()
    overlap_depth: int = 0  # steps launched while one runs; tokens are then seen one step late
    environment: dict[str, str] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    events: tuple[PlanEvent, ...] = ()  # filled by the engine after planning
    measured: MeasuredMemory | None = None  # filled by the engine once it has started

    def path_name(self, mode: ForwardMode) -> str:
        """Name of the planned path of `mode`, such as "eager+torch_sdpa+torch"."""
        return self.paths[mode].name

    def with_event(self, stage: str, message: str) -> ExecutionPlan:
        """The same plan, with one more thing that happened to it."""
        return replace(self, events=(*self.events, PlanEvent(stage=stage, message=message)))

    def with_path(self, path: ExecutionPath) -> ExecutionPlan:
        """The plan with another path for that path's mode: a rung of the ladder."""
        return replace(self, paths={**self.paths, path.mode: path})

    def fingerprint(self) -> str:
        """A name for all that decides results and speed; free memory and pool sizes do not."""
        decisive = {name: to_json(getattr(self, name)) for name in DECISIVE}
        text = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
        return "pp-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:  # Any: plain JSON
        """Stable form: `schema`, `fingerprint`, then every field."""
        return {"schema": SCHEMA, "fingerprint": self.fingerprint(), **to_json(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExecutionPlan:
        """Inverse of `to_json`; ConfigurationError for another schema or an unknown key."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ConfigurationError(f"this is no plan of schema {SCHEMA}")
        rest = {k: item for k, item in data.items() if k not in ("schema", "fingerprint")}
        return from_json(cls, rest)


DECISIVE = (
    *("software", "model", "device", "device_name", "dtype", "kv_dtype", "page_size"),
    *(
        "linear_method",
        "quantization",
        "paths",
        "max_num_seqs",
        "max_num_batched_tokens",
        "prefix_cache",
    ),
    *("num_threads", "native_kernels", "capture_sizes", "overlap_depth", "environment"),
)
"""Fields that the fingerprint covers."""
