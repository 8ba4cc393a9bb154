"""One named execution path with taps on everything it computes: what `polypath diff` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .build_context import BuildContext
from .checkpoint.source import Checkpoint
from .config import EngineConfig
from .engine_parts import load_model, make_context, make_runners
from .errors import ConfigurationError, EngineError
from .forward_batch import ForwardBatch
from .forward_mode import ForwardMode
from .kv.pool import KVPool
from .ladder import capture_graphs
from .model_runner import ModelRunner
from .models.decoder import Decoder
from .ops import registry as ops_registry
from .planning.candidate import find
from .planning.plan import ExecutionPlan
from .request import Request
from .runners.runner import Reason
from .runners.static_batch import StaticBatch
from .scheduler import RequestState, ScheduledRow
from .taps import TapName, Taps, tap_attention, tap_model

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")


def named_path(text: str, config: EngineConfig) -> EngineConfig:
    """`config` with the candidates that RUNNER+ATTENTION+OPS names, and after these in any order a
    linear method, a dtype and a device. Raises ConfigurationError.
    """
    names = text.split("+")
    if len(names) < 3 or not all(names):
        raise ConfigurationError(
            f"{text!r} is no path; write RUNNER+ATTENTION+OPS as `polypath plan` prints it, such "
            "as eager+torch_sdpa+torch, and +LINEAR_METHOD, +DTYPE or +DEVICE after it"
        )
    wishes: dict[str, str] = {}
    wishes |= zip(("runner", "attention_backend", "ops"), names, strict=False)
    for name in names[3:]:
        option = "linear_method"
        option = "dtype" if name in DTYPES else "device" if name in DEVICES else option
        if option in wishes:
            raise ConfigurationError(f"{text!r} names two of {option}; name one")
        wishes[option] = name
    return replace(config, **wishes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A planned path with its weights."""

    plan: ExecutionPlan
    context: BuildContext
    model: Decoder


def load_path(checkpoint: Checkpoint, plan: ExecutionPlan, beside: Loaded | None) -> Loaded:
    """Load a plan's weights, or take those of `beside` where they are the same."""
    context = make_context(checkpoint.config, plan)
    if beside is None or _weights_of(beside.plan) != _weights_of(plan):
        return Loaded(plan=plan, context=context, model=load_model(checkpoint, plan, context))
    ops = find(ops_registry.CANDIDATES, plan.paths[ForwardMode.DECODE].ops).load().build(context)
    model = Decoder(checkpoint.config, beside.model.weights, ops)
    return Loaded(plan=plan, context=context, model=model)


def _weights_of(plan: ExecutionPlan) -> tuple[object, ...]:
    """What two plans must share to share weights."""
    return plan.device, plan.dtype, plan.linear_method, plan.quantization, plan.native_kernels


class TappedPath:
    """Runs ragged copies of one sequence on a path of its own, in a pool of its own."""

    def __init__(
        self, loaded: Loaded, *, copies: int, length: int, max_tokens: int, forced: bool = False
    ) -> None:
        plan, context = loaded.plan, loaded.context
        num_pages = -(-length // plan.page_size)
        self.kv = KVPool(
            loaded.model.config,
            num_pages=1 + copies * num_pages,
            page_size=plan.page_size,
            dtype=getattr(torch, plan.kv_dtype),
            device=context.device,
        )
        self.taps = Taps(max_tokens, context.library, forced=forced)
        self._device = context.device
        self._states = [_state(i, num_pages, length) for i in range(copies)]
        self._slots = torch.empty(0, dtype=torch.int64, device=context.device)
        self._runner, self.plan = self._make_runner(loaded)

    def _make_runner(self, loaded: Loaded) -> tuple[ModelRunner, ExecutionPlan]:
        """One eager pass makes the buffers of the taps; then graphs are captured with them."""
        plan, context = loaded.plan, loaded.context
        model = tap_model(loaded.model, self.taps)
        runners = make_runners(
            model, self.kv, plan, context, lambda backend: tap_attention(backend, self.taps)
        )
        scratch = StaticBatch(
            tokens=1, rows=1, max_pages=1, page_size=plan.page_size, device=context.device
        )
        eager = runners[ForwardMode.DECODE][-1]
        with torch.inference_mode():
            eager.run(scratch.batch(ForwardMode.DECODE))
        rung = capture_graphs(runners, plan)
        if rung.plan.paths != plan.paths:
            events = "; ".join(e.message for e in rung.plan.events if e.stage == "graphs")
            raise EngineError(f"{plan.path_name(ForwardMode.DECODE)} cannot run: {events}")
        return ModelRunner(rung.runners), rung.plan

    def run(
        self, counts: Sequence[int], ids: Sequence[int]
    ) -> tuple[ForwardBatch, torch.Tensor, Reason]:
        """Compute the next `counts[c]` tokens of each copy of `ids`: logits [T, V] of them all."""
        rows = []
        for state, count in zip(self._states, counts, strict=True):
            state.token_ids = list(ids)
            if count:
                rows.append(ScheduledRow(state, count))
        batch = ForwardBatch.build(rows, page_size=self.kv.page_size, device=self._device)
        batch = batch.with_logits_rows(range(batch.num_tokens))
        self._slots = batch.slots
        logits, _, reason = self._runner.forward(batch)
        for row in rows:
            row.state.num_computed += row.num_tokens
        return batch, logits.values, reason

    def values(self) -> dict[TapName, torch.Tensor]:
        """What the last run computed, float32 [T, width], in order of the operations."""
        found: dict[TapName, torch.Tensor] = {}
        for name, value in self.taps.read(self._slots.numel()).items():
            found[name] = value
            if name.operation == "qkv_norm_rope_store" and name.layer is not None:
                keys, values = self.stored(name.layer, self._slots)
                found[TapName(name.layer, "stored keys")] = keys
                found[TapName(name.layer, "stored values")] = values
        return found

    def stored(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values float32 [T, K * D] in these slots."""
        pages, places = slots // self.kv.page_size, slots % self.kv.page_size
        keys = self.kv.layers[layer][pages, 0, places]
        values = self.kv.layers[layer][pages, 1, places]
        return keys.flatten(1).float(), values.flatten(1).float()

    def take_past(self, other: TappedPath) -> None:
        """Copy keys and values of all tokens computed so far from another path's pool."""
        for ours, theirs in zip(self._states, other._states, strict=True):
            where = ours.num_computed
            if where == 0:
                continue
            from_slots, to_slots = other._slots_of(theirs, where), self._slots_of(ours, where)
            pages, places = to_slots // self.kv.page_size, to_slots % self.kv.page_size
            for layer, pool in enumerate(self.kv.layers):
                for part, value in enumerate(other.stored(layer, from_slots)):
                    shape = (where, *pool.shape[3:])
                    pool[pages, part, places] = value.view(shape).to(pool)

    def _slots_of(self, state: RequestState, num_tokens: int) -> torch.Tensor:
        places = torch.arange(num_tokens, device=self._device)
        pages = torch.tensor(state.pages, device=self._device)[places // self.kv.page_size]
        return pages * self.kv.page_size + places % self.kv.page_size


def _state(index: int, num_pages: int, length: int) -> RequestState:
    state = RequestState(Request(id=str(index), prompt_ids=(0,)), index, length + 1)
    state.pages = list(range(1 + index * num_pages, 1 + (index + 1) * num_pages))
    return state
