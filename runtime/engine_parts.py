"""What an engine is made of, part by part, as its plan says: kernels, model, KV pool, runners."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ..kernels.cpu.library import load
from .attention import registry as attention_registry
from .attention.backend import AttentionBackend
from .attention.loading import load_backend
from .build_context import BuildContext
from .checkpoint.source import Checkpoint
from .config import ModelConfig
from .forward_mode import ForwardMode
from .kv.pages import Pages
from .kv.pool import KVPool
from .linear import registry as linear_registry
from .models.decoder import Decoder
from .ops import registry as ops_registry
from .planning.candidate import find
from .planning.plan import ExecutionPlan
from .runners import registry as runner_registry
from .runners.runner import Runner, RunnerParts
from .weights import WeightLoader


def make_context(model: ModelConfig, plan: ExecutionPlan) -> BuildContext:
    """Load the planned native kernels and give each team its threads.

    Where all work of a step is native, torch keeps one thread, so that no second team competes.
    """
    library = None
    if plan.native_kernels is not None:
        library = load(plan.native_kernels)
        library.quick["pp_set_threads"](plan.num_threads)
    torch.set_num_threads(1 if _is_all_native(plan) else plan.num_threads)
    return BuildContext(
        model=model,
        dtype=getattr(torch, plan.dtype),
        device=torch.device(plan.device),
        library=library,
        quantization=plan.quantization,
        page_size=plan.page_size,
        flash_attn_library=plan.flash_attn_library,
    )


def _is_all_native(plan: ExecutionPlan) -> bool:
    """Whether linear layers, attention and ops of every mode are native."""
    names = [(linear_registry.CANDIDATES, plan.linear_method)]
    for path in plan.paths.values():
        names += [(attention_registry.CANDIDATES, path.attention_backend)]
        names += [(ops_registry.CANDIDATES, path.ops)]
    return all(find(candidates, name).capability.native_kernels for candidates, name in names)


def load_model(
    checkpoint: Checkpoint,
    plan: ExecutionPlan,
    context: BuildContext,
    on_share: Callable[[float], None] = lambda share: None,
) -> Decoder:
    """Weights and ops table of a plan; `on_share` hears how much is loaded, 0 to 1."""
    method = find(linear_registry.CANDIDATES, plan.linear_method).load().build(context)
    loader = WeightLoader(checkpoint, method, dtype=context.dtype, device=context.device)
    weights = loader.load(on_share)
    ops = find(ops_registry.CANDIDATES, plan.paths[ForwardMode.DECODE].ops).load().build(context)
    return Decoder(checkpoint.config, weights, ops)


def make_pool(model: ModelConfig, plan: ExecutionPlan) -> tuple[KVPool, Pages]:
    """The tensors of a plan's pages on its device, and who holds which of them."""
    kv = KVPool(
        model,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        dtype=getattr(torch, plan.kv_dtype),
        device=torch.device(plan.device),
    )
    return kv, Pages(plan.num_pages, plan.page_size, prefix_cache=plan.prefix_cache)


def make_runners(
    model: Decoder,
    kv: KVPool,
    plan: ExecutionPlan,
    context: BuildContext,
    watch: Callable[[AttentionBackend], AttentionBackend] = lambda backend: backend,
) -> dict[ForwardMode, tuple[Runner, ...]]:
    """Of each mode, best first: the planned runner, then its rungs; each made once a backend.
    `watch` may wrap a backend, to see what it computes.
    """
    backends = {
        name: watch(load_backend(name, context))
        for name in sorted({path.attention_backend for path in plan.paths.values()})
    }

    @cache
    def make(name: str, backend: str) -> Runner:
        parts = RunnerParts(
            model=model,
            kv=kv,
            attention=backends[backend],
            context=context,
            capture_sizes=plan.capture_sizes,
            max_tokens=plan.max_num_batched_tokens,
            max_rows=plan.max_num_seqs,
            max_pages=-(-plan.max_model_len // plan.page_size),
        )
        return find(runner_registry.CANDIDATES, name).load().build(parts)

    return {
        mode: tuple(make(name, path.attention_backend) for name in _rungs(mode, plan))
        for mode, path in plan.paths.items()
    }


def _rungs(mode: ForwardMode, plan: ExecutionPlan) -> list[str]:
    """The planned runner, the piecewise one of other modes where attention is the same, eager."""
    path = plan.paths[mode]
    others = [
        other.runner
        for other in plan.paths.values()
        if path.runner != "eager"
        and other.attention_backend == path.attention_backend
        and not find(runner_registry.CANDIDATES, other.runner).capability.captures_attention
    ]
    return list(dict.fromkeys([path.runner, *others, "eager"]))
