"""Sizes of graphs, and what they take."""

from __future__ import annotations

import pytest

from polypath.runtime.planning.capture_sizes import Captures, padded_sizes, powers, token_sizes
from polypath.runtime.planning.graph_memory import graph_bytes
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.planner import plan
from polypath.tests.unit.planning.asking import wishes
from polypath.tests.unit.planning.public_models import public_model


@pytest.mark.parametrize("most", [1, 3, 8, 9, 32, 100, 256, 500])
def test_every_batch_has_a_graph_and_the_largest_is_the_most_that_runs(most: int) -> None:
    for sizes in (powers(most), padded_sizes(most), token_sizes(most)):
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most


def test_what_is_padded_gets_four_sizes_a_doubling() -> None:
    assert padded_sizes(32) == (1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32)
    assert len(padded_sizes(256)) == 24


def test_pieces_end_where_computing_takes_longer_than_launching() -> None:
    assert token_sizes(8192)[-1] == 2048 and token_sizes(8192)[:4] == (8, 12, 16, 24)


def test_nothing_captured_is_nothing_taken(model) -> None:
    none = Captures(whole=False, pieces=False, is_padded=True)
    assert none.decode_sizes(256) == none.piece_sizes(8192) == ()
    assert graph_bytes(model, 2, (), (), True) == 0


def test_graphs_of_a_one_billion_model_are_what_others_logged() -> None:
    """vLLM #11349: 35 decode sizes of Llama-3.2-1B took 0.21 GiB without their pool."""
    llama = public_model("Llama-3.2-1B")
    graphs = graph_bytes(llama, 2, tuple(range(1, 36)), (), True)
    pool = graph_bytes(llama, 2, (35,), (), True) - graph_bytes(llama, 2, (), (), True)
    assert 0.15 * 2**30 < graphs - pool < 0.3 * 2**30


def test_a_plan_without_graphs_keeps_their_memory_for_the_pool() -> None:
    node, llama = load_hardware("h100"), public_model("Llama-3.1-8B")
    eager = plan(node, llama, wishes(runner="eager"))
    assert eager.memory.graph_bytes == 0 and eager.capture_sizes == ()
    found = plan(node, llama, wishes())
    captures = any(path.runner != "eager" for path in found.paths.values())
    assert (found.memory.graph_bytes > 0) == captures
    assert (found.num_pages < eager.num_pages) == captures
