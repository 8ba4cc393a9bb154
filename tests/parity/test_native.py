"""The native 4-bit path of the default model against float32 on the same weights: text and
perplexity.

Activations are rounded to 8 bits, so texts may part; they part where two tokens are nearly as
likely.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.runtime.quality import log_likelihood
from polypath.tests.driving import (
    Answer,
    build_engine,
    build_yardstick,
    request,
    run,
    run_alone,
)
from polypath.tests.parity.test_smollm2 import PROMPTS

NUM_NEW = 64
NEAR_TIE = 0.3  # of log-probability, between the tokens at which the texts part
TEXT = Path(__file__).parent / "walden.txt"
needs_native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


@pytest.fixture(scope="module")
def engines(default_model_path: Path) -> tuple[Engine, Engine]:
    """The native path, and the yardstick on the same file."""
    options = {"pages": 400, "max_model_len": 1024}
    native = build_engine(default_model_path, **options)
    assert native.plan.linear_method == "int4_group"
    return native, build_yardstick(default_model_path, **options)


def greedy(engine: Engine) -> dict[str, Answer]:
    encode = engine.tokenizer.encode
    options = {"max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 5}
    return run(engine, [request(text, encode(text), **options) for text in PROMPTS])


@needs_native
def test_greedy_text_is_equal_or_parts_at_a_near_tie(engines: tuple[Engine, Engine]) -> None:
    native, plain = (greedy(engine) for engine in engines)
    held = 0
    for text in PROMPTS:
        pairs = zip(native[text].token_ids, plain[text].token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            held += 1
            continue
        said = native[text].token_ids[first]
        rivals = dict(plain[text].logprobs[first].top)
        gap = plain[text].logprobs[first].logprob - rivals.get(said, -math.inf)
        print(f"{text!r}: parts at token {first}, gap {gap:.3f}")
        held += gap < NEAR_TIE
    assert held >= 0.9 * len(PROMPTS)


def perplexity(engine: Engine) -> float:
    ids = engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    total, count = log_likelihood(engine, ids, window=512)
    return math.exp(-total / count)


@needs_native
def test_perplexity_is_within_one_percent(engines: tuple[Engine, Engine]) -> None:
    native, plain = (perplexity(engine) for engine in engines)
    print(f"perplexity {native:.3f} native, {plain:.3f} float32, ratio {native / plain:.4f}")
    assert abs(native / plain - 1) < 0.01


@needs_native
def test_together_cached_cut_and_preempted_give_the_bits_of_alone(default_model_path: Path) -> None:
    """Lengths one above a page and a budget that leaves single tokens over: a prompt's last token
    then comes by itself, as decode tokens do.
    """
    roomy = build_engine(default_model_path, pages=200, max_model_len=256, prefix_cache=False)
    narrow = build_engine(
        default_model_path, pages=18, max_model_len=256, max_num_batched_tokens=33
    )
    ids = roomy.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    requests = [
        request(str(n), ids[7 * n : 7 * n + n], max_tokens=24, ignore_eos=True, logprobs=1)
        for n in (2, 17, 33, 34, 65, 113)
    ]
    alone = run_alone(roomy, requests)
    for engine in (roomy, narrow, narrow):  # the second time its prompts are cached
        together = run(engine, requests)
        for name, answer in alone.items():
            assert together[name].token_ids == answer.token_ids
            assert together[name].logprobs == answer.logprobs
    assert narrow.stats()["preemptions_total"]
    assert narrow.stats()["prefix_cached_tokens_total"]
