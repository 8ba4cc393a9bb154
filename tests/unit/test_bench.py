"""What `measure` runs, counts and refuses."""

from __future__ import annotations

import pytest

from polypath.runtime.bench import Measurement, Workload, measure, median, model_cost
from polypath.runtime.engine import Engine
from polypath.runtime.errors import ConfigurationError
from polypath.runtime.weights import stored_bytes
from polypath.tests import tiny_models
from polypath.tests.driving import assert_empty, build_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.random(folder)
    return build_engine(folder, runner="eager", pages=40, max_model_len=128, max_num_seqs=4)


def test_every_row_decodes_in_every_timed_step(engine: Engine) -> None:
    """Prompts that come in several steps leave rows that start early; none may end early."""
    folder = engine.checkpoint.path
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    narrow = build_engine(folder, runner="eager", pages=40, **options)
    before = narrow.counters.generation_tokens
    found = measure(narrow, Workload(batch=4, prompt_tokens=20, new_tokens=6))
    decode_steps = found.steps["decode eager planned"]
    assert decode_steps >= 5
    assert narrow.counters.generation_tokens - before >= 4 * 6
    assert found.steps["mixed eager planned"] > 0
    assert_empty(narrow)


def test_step_is_forward_and_host(engine: Engine) -> None:
    found = measure(engine, Workload(batch=2, prompt_tokens=8, new_tokens=5))
    assert found.step_ms == pytest.approx(found.forward_ms + found.host_ms)
    assert found.decode_tokens_s == pytest.approx(2 * 1e3 / found.step_ms)
    assert min(found.forward_ms, found.host_ms, found.prefill_tokens_s) > 0


def test_a_prompt_alone_decodes_nothing(engine: Engine) -> None:
    found = measure(engine, Workload(batch=1, prompt_tokens=30, new_tokens=1))
    assert found.decode_tokens_s == found.step_ms == found.host_ms == 0.0
    assert found.steps == {"prefill eager planned": 1}


@pytest.mark.parametrize(
    ("workload", "option"),
    [
        (Workload(batch=5, prompt_tokens=8, new_tokens=2), "--max-num-seqs"),
        (Workload(batch=1, prompt_tokens=120, new_tokens=64), "--max-model-len"),
        (Workload(batch=4, prompt_tokens=115, new_tokens=64), "--max-model-len"),
    ],
)
def test_what_the_engine_cannot_hold_at_once_names_the_option(
    engine: Engine, workload: Workload, option: str
) -> None:
    with pytest.raises(ConfigurationError, match=option):
        measure(engine, workload)
    assert_empty(engine)


def test_a_pool_too_small_names_kv_bytes(engine: Engine) -> None:
    small = build_engine(engine.checkpoint.path, pages=4, max_model_len=64)
    with pytest.raises(ConfigurationError, match="KV pages, and this engine has 4; raise --kv-byt"):
        measure(small, Workload(batch=2, prompt_tokens=32, new_tokens=16))


def test_medians_are_taken_figure_by_figure_and_steps_summed() -> None:
    def made(prefill: float, step: float) -> Measurement:
        return Measurement(
            workload=Workload(batch=1, prompt_tokens=1, new_tokens=2),
            prefill_tokens_s=prefill,
            decode_tokens_s=1.0,
            step_ms=step,
            forward_ms=step / 2,
            host_ms=step / 2,
            steps={"decode eager planned": 3},
        )

    found = median([made(1.0, 30.0), made(3.0, 10.0), made(2.0, 20.0)])
    assert (found.prefill_tokens_s, found.step_ms, found.host_ms) == (2.0, 20.0, 10.0)
    assert found.steps == {"decode eager planned": 9}


def test_the_cost_counts_weights_as_the_engine_stores_them(engine: Engine) -> None:
    cost = model_cost(engine)
    weights = engine.model.weights
    assert cost.weight_bytes == stored_bytes(engine.model.config, weights)
    assert cost.embedding_bytes == weights.embedding.num_bytes  # untied: only looked up
    assert not cost.is_int8
