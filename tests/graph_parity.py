"""What every attention backend of a GPU must pass on a CPU, over its package in torch: the tokens
of the yardstick, eager and on graphs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polypath.runtime.attention.backend import AttentionBackend
from polypath.runtime.attention.torch_sdpa import TorchSdpaBackend
from polypath.runtime.build_context import BuildContext
from polypath.runtime.engine import Engine
from polypath.tests.driving import assert_same_answers, greedy, run
from polypath.tests.graph_engine import MakeBackend, MakeMechanism, eager_engine, graph_engine

WINDOW = 24  # tokens


def windowed(context: BuildContext) -> BuildContext:
    """The same model, whose first layer sees a few tokens only."""
    others = (None,) * (context.model.num_layers - 1)
    return replace(context, model=replace(context.model, layer_windows=(WINDOW, *others)))


def sdpa(context: BuildContext) -> AttentionBackend:
    """The yardstick's attention."""
    return TorchSdpaBackend(context.model, context.dtype)


def assert_parity(
    model: Path,
    backend: MakeBackend,
    *,
    mechanism: MakeMechanism | None,
    has_window: bool = False,
    page_size: int = 16,
) -> Engine:
    """Greedy answers equal torch_sdpa's; `mechanism` None is eager. Returns the engine."""

    def made(make: MakeBackend) -> MakeBackend:
        return (lambda context: make(windowed(context))) if has_window else make

    pool = {"pages": 60, "page_size": page_size, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    reference = run(eager_engine(model, made(sdpa), **pool), greedy(8))
    if mechanism is None:
        engine = eager_engine(model, made(backend), **pool)
    else:
        engine, _ = graph_engine(model, made(backend), mechanism, **pool)
    assert_same_answers(run(engine, greedy(8)), reference)
    return engine
