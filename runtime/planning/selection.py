"""The choice itself: of all combinations that every rule accepts, the one that ranks best.

Ranks are places on the list of the device's class (priorities.py), so nothing depends on the order
in which rules run. A path's cost is the sum of its three ranks, the runner's first: a graph saves a
small model more than one attention backend does over another. The device is the best usable one;
of the other values that all modes share, a better dtype counts first, then the cost of all paths
and of the linear method, then page size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from ..attention import registry as attention
from ..config import EngineConfig, ModelConfig
from ..forward_mode import ForwardMode
from ..linear import registry as linear
from ..ops import registry as ops
from ..runners import registry as runners
from .candidate import Candidate, find
from .capability import STEP_MODES, CandidateKind, Capability
from .device import DEVICES, why_not_device
from .dtypes import dtype_candidates, why_not_dtype
from .hardware import Hardware
from .plan import ExecutionPath
from .priorities import device_class, rank
from .quantization import holds, weight_width
from .rules import Situation, why_not, why_not_together
from .wishes import wish_of

REGISTRIES: dict[CandidateKind, tuple[Candidate, ...]] = {
    "runner": runners.CANDIDATES,
    "attention": attention.CANDIDATES,
    "ops": ops.CANDIDATES,
    "linear": linear.CANDIDATES,
}
WISHES: dict[CandidateKind, str] = {
    "runner": "runner",
    "attention": "attention_backend",
    "ops": "ops",
    "linear": "linear_method",
}
"""Field of EngineConfig that names a candidate of each kind."""

PATH_KINDS: tuple[CandidateKind, ...] = ("runner", "attention", "ops")
PAGE_SIZES = (16, 32, 64, 128, 256)
"""Tokens a page that "auto" tries, best first: 16 wastes least and is legal almost everywhere."""


COSTS: dict[CandidateKind, int] = {"runner": 10, "attention": 1, "ops": 1, "linear": 1}
"""Of one place on a list; more than all places of the lists that count less."""

ROUNDING_COST = 1000
"""More than all ranks together: no faster path is worth weights that nobody asked to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Chosen candidates and the values they share."""

    situation: Situation
    linear_method: str
    width: str  # what weights are rounded to, or "stored"
    paths: dict[ForwardMode, ExecutionPath]

    def uses_native_kernels(self) -> bool:
        """Whether any chosen candidate runs our compiled CPU kernels."""
        names: set[tuple[CandidateKind, str]] = {("linear", self.linear_method)}
        for path in self.paths.values():
            names |= {("attention", path.attention_backend), ("ops", path.ops)}
        return any(find(REGISTRIES[kind], name).capability.native_kernels for kind, name in names)


def select(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> Selection | None:
    """The best selection that every rule accepts, or None."""
    for device, dtype in _devices_and_dtypes(hardware, model, config):
        if why_not_device(hardware, device) or why_not_dtype(hardware, device, dtype):
            continue
        ranked = [
            (cost, place, selection)
            for place, page_size in enumerate(_page_sizes(config))
            if (found := _select_at(hardware, model, config, device, dtype, page_size)) is not None
            for cost, selection in [found]
        ]
        if ranked:
            return min(ranked, key=lambda item: item[:2])[2]
    return None


def first_situation(hardware: Hardware, model: ModelConfig, config: EngineConfig) -> Situation:
    """The situation that would have been liked best, for explaining why nothing was found."""
    device, dtype = _devices_and_dtypes(hardware, model, config)[0]
    return _situation(hardware, model, config, device, dtype, _page_sizes(config)[0])


def allowed(kind: CandidateKind, config: EngineConfig, mode: ForwardMode | None) -> list[Candidate]:
    """Candidates to consider: the named one alone, in the modes that it claims, else all."""
    wish = wish_of(getattr(config, WISHES[kind]), mode)
    if wish == "auto":
        return list(REGISTRIES[kind])
    named = find(REGISTRIES[kind], wish)
    claims = mode is None or mode in named.capability.modes
    return [named] if claims else list(REGISTRIES[kind])


def _devices_and_dtypes(
    hardware: Hardware, model: ModelConfig, config: EngineConfig
) -> list[tuple[str, str]]:
    device = auto_device(hardware) if config.device == "auto" else config.device
    return [(device, dtype) for dtype in dtype_candidates(model, config, device)]


def auto_device(hardware: Hardware) -> str:
    """The best device that can be used; a usable card is never left idle because of a wish."""
    usable = [device for device in DEVICES if not why_not_device(hardware, device)]
    return usable[0] if usable else "cpu"


def _page_sizes(config: EngineConfig) -> tuple[int, ...]:
    return PAGE_SIZES if config.page_size is None else (config.page_size,)


def _situation(
    hardware: Hardware,
    model: ModelConfig,
    config: EngineConfig,
    device: str,
    dtype: str,
    page_size: int,
) -> Situation:
    return Situation(
        hardware=hardware,
        model=model,
        device=device,
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        page_size=page_size,
        quantization=config.quantization,
    )


def _select_at(
    hardware: Hardware,
    model: ModelConfig,
    config: EngineConfig,
    device: str,
    dtype: str,
    page_size: int,
) -> tuple[int, Selection] | None:
    """(cost, selection) at fixed shared values."""
    situation = _situation(hardware, model, config, device, dtype, page_size)
    fitting = [_Fitting.of(replace(situation, mode=mode), config) for mode in STEP_MODES]
    found = [
        (_linear_rank(c, situation) + sum(cost for cost, _ in best), place, c.name, best)
        for place, c in enumerate(allowed("linear", config, None))
        if not why_not(c.capability, situation)
        and (best := _best_paths(fitting, c.capability)) is not None
    ]
    if not found:
        return None
    cost, _, method, best = min(found, key=lambda item: item[:2])
    return cost, Selection(
        situation=situation,
        linear_method=method,
        width=weight_width(config, find(REGISTRIES["linear"], method).capability, model),
        paths={path.mode: path for _, path in best},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fitting:
    """What fits one mode on its own: combinations of runner, backend and ops, and their costs."""

    mode: ForwardMode
    combinations: list[tuple[int, tuple[Candidate, ...]]]

    @classmethod
    def of(cls, situation: Situation, config: EngineConfig) -> _Fitting:
        assert situation.mode is not None, "a path belongs to a mode"
        fitting = [
            [
                (_rank(kind, c, situation), c)
                for c in allowed(kind, config, situation.mode)
                if not why_not(c.capability, situation)
            ]
            for kind in PATH_KINDS
        ]
        combinations = [
            (sum(cost for cost, _ in fit), tuple(c for _, c in fit)) for fit in product(*fitting)
        ]
        return cls(mode=situation.mode, combinations=combinations)


def _best_paths(
    fitting: list[_Fitting], linear_method: Capability
) -> list[tuple[int, ExecutionPath]] | None:
    """(cost, path) of every mode, or None where one has none."""
    paths = [path for fit in fitting if (path := _best_path(fit, linear_method)) is not None]
    return paths if len(paths) == len(fitting) else None


def _best_path(fitting: _Fitting, linear_method: Capability) -> tuple[int, ExecutionPath] | None:
    found = [
        (cost, fit)
        for cost, fit in fitting.combinations
        if _go_together(fit, linear_method, fitting.mode)
    ]
    if not found:
        return None
    cost, (runner, backend, table) = min(found, key=lambda item: item[0])
    path = ExecutionPath(
        mode=fitting.mode, runner=runner.name, attention_backend=backend.name, ops=table.name
    )
    return cost, path


def _go_together(fit: tuple[Candidate, ...], linear_method: Capability, mode: ForwardMode) -> bool:
    runner, *others = (candidate.capability for candidate in fit)
    return why_not_together(runner, (*others, linear_method), mode) is None


def _linear_rank(candidate: Candidate, situation: Situation) -> int:
    """Methods that hold the checkpoint's weights as they are go before those that widen them, and
    those before all that round them.
    """
    capability = candidate.capability
    stored = situation.model.stored_dtype
    tier = 0 if holds(capability, stored) else 2 if capability.quantizes else 1
    return _rank("linear", candidate, situation) + tier * ROUNDING_COST


def _rank(kind: CandidateKind, candidate: Candidate, situation: Situation) -> int:
    place = rank(kind, candidate.name, device_class(situation.hardware, situation.device))
    return place * COSTS[kind]
