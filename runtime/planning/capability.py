"""What one candidate (runner, attention backend, ops, linear method) can do, beside its code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..forward_mode import ForwardMode

CandidateKind = Literal["runner", "attention", "ops", "linear"]
GraphSupport = Literal["always", "uniform", "single_token", "never"]

ALL_DTYPES = ("float32", "bfloat16", "float16")
STEP_MODES = (ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.MIXED)
"""The modes that this version schedules, and so plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrier:
    """One of several packages that have what a candidate runs: any of them is enough, the first
    that fits is taken.
    """

    package: str  # as in `Capability.packages`
    page_multiple: int = 1  # tokens
    torch: str | None = None  # the only version it is built for
    compute_capability: int | None = None  # the only major one


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """Where a candidate runs and what it accepts. What a record does not claim, it does not get.

    None for a range, set or limit means: any. Only attention backends are asked about KV dtypes,
    page sizes, head dims, group size, windows, soft cap, sinks and drafts. `built=False` records a
    candidate that this version has no adapter for.
    """

    name: str  # how users spell it, such as "torch_sdpa"
    kind: CandidateKind
    source: str  # file of the adapter, from the package's root
    devices: tuple[str, ...]  # of "cpu", "cuda"
    modes: tuple[ForwardMode, ...] = STEP_MODES
    dtypes: tuple[str, ...] = ALL_DTYPES  # of weights and activations
    dtypes_on_device: tuple[tuple[str, tuple[str, ...]], ...] = ()  # narrower than `dtypes` there
    kv_dtypes: tuple[str, ...] | None = None  # None: the dtype of activations alone
    page_sizes: tuple[int, ...] | None = None  # tokens
    head_dims: tuple[int, ...] | None = None
    max_group_size: int | None = None  # query heads for each KV head
    min_compute_capability: tuple[int, int] | None = None  # inclusive
    max_compute_capability: tuple[int, int] | None = None  # inclusive
    architectures: tuple[str, ...] | None = None  # of the CPU, as `uname -m` spells them
    required_isa: tuple[str, ...] = ()  # CPU flags as /proc/cpuinfo spells them; all of them
    sliding_window: bool = False
    soft_cap: bool = False  # of attention: c * tanh(logits / c), as ModelConfig asks
    attention_sinks: bool = False  # of attention: one learned logit a head
    draft_width: int = 1  # of attention: tokens of one request that a verify step may check
    draft_trees: bool = False  # of attention: whether those may branch
    graph_support: GraphSupport = "never"  # of attention: which batches may be captured
    workspace_bytes: int = 0  # of attention: kept on the device, shared by all its plans of batches
    plan_bytes: int = 0  # of attention: kept for each plan; sizes.py counts them
    captures_attention: bool = False  # of runners: attention runs inside the captured graph
    captures_native: bool = False  # of runners: only native kernels can be captured
    batch_invariant: bool = False  # a row's result does not depend on its neighbours
    packages: tuple[str, ...] = ()  # keys of Hardware.packages: "name", "name>=1.2,<2"
    carriers: tuple[Carrier, ...] = ()  # best first
    needs_compiler: bool = False  # a C++ compiler with Python's headers, at start
    needs_nvcc: bool = False  # CUDA's compiler, or kernels that were compiled before
    native_kernels: bool = False  # a build of kernels/cpu that this CPU can run
    keeps_stored: tuple[str, ...] = ()  # checkpoint types that a linear method keeps as they are
    repacks: tuple[str, ...] = ()  # and those that it rounds anew, with next to nothing lost
    quantizes: tuple[str, ...] = ()  # what `--quantization` may ask of it
    built: bool = True

    def dtypes_for(self, device: str) -> tuple[str, ...]:
        """Dtypes of weights and activations it takes on `device`."""
        return dict(self.dtypes_on_device).get(device, self.dtypes)
