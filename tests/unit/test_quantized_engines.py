"""Engines over rounded and repacked weights: each passes its own self-check, and what it stores is
as near to the checkpoint as its type allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.engine import Engine
from polypath.runtime.linear.method import Linear
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.tests import tiny_models
from polypath.tests.driving import build_engine, build_yardstick, request, run, run_alone

native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)
torch_int8 = pytest.mark.skipif(
    "avx2" not in load_hardware("this").cpu.isa, reason="FBGEMM needs AVX2"
)
MODELS = ("bfloat16", "float16", "F16", "Q8_0", "Q4_0", "Q5_1", "Q4_K_M", "Q5_K", "Q6_K")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same random weights in each form."""
    base = tmp_path_factory.mktemp("models")
    paths: dict[str, Path] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        paths[dtype] = base / dtype
        tiny_models.random(paths[dtype], hidden=256, dtype=getattr(torch, dtype))
    for kind in MODELS[2:]:
        paths[kind] = base / f"{kind}.gguf"

        def narrow_too(name: str, shape: tuple[int, ...], kind: str = kind) -> str:
            return "Q8_0" if kind.endswith("_K") and shape[-1] % 256 else kind

        of = tiny_models.q4_k_m if kind == "Q4_K_M" else narrow_too
        tiny_models.to_gguf(paths["float32"], paths[kind], of)
    return paths


def agrees(engine: Engine) -> bool:
    """Whether the self-check ran and passed."""
    return any("agrees with" in event.message for event in engine.plan.events)


def matrices(engine: Engine) -> dict[str, Linear]:
    weights = engine.model.weights
    layer = weights.layers[1]
    named = {"embedding": weights.embedding, "head": weights.lm_head}
    return named | {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}


def errors(engine: Engine, folder: Path) -> dict[str, float]:
    """Relative error of each stored matrix against the unrounded weights."""
    exact = matrices(build_yardstick(folder, pages=4, max_model_len=32))
    found = {}
    for name, layer in matrices(engine).items():
        wanted = exact[name].dequantized()
        found[name] = float((layer.dequantized() - wanted).norm() / wanted.norm())
    return found


@native
@pytest.mark.parametrize(
    ("model", "options", "method", "linear_error", "embedding_error"),
    [
        ("bfloat16", {"quantization": "int8"}, "int8", 0.006, 0.006),
        ("bfloat16", {"quantization": "int4"}, "int4_group", 0.075, 0.006),
        ("float16", {"quantization": "int4"}, "int4_group", 0.075, 0.006),
        ("F16", {"quantization": "int8"}, "int8", 0.006, 0.006),
        ("Q8_0", {"quantization": "int4"}, "int4_group", 0.075, 0.006),
        ("float32", {"linear_method": "int4_group"}, "int4_group", 0.075, 0.006),
        ("Q4_0", {}, "int4_group", 0.1, 0.1),
        ("Q5_1", {}, "int8", 0.05, 0.05),
        ("Q4_K_M", {}, "int4_group", 0.09, 0.09),
        ("Q4_K_M", {"quantization": "int4"}, "int4_group", 0.1, 0.09),
        ("Q5_K", {}, "int8", 0.045, 0.045),
        ("Q6_K", {}, "int8", 0.025, 0.025),
    ],
)
def test_native_weights_are_as_near_as_their_type_allows(
    models, model, options, method, linear_error, embedding_error
) -> None:
    engine = build_engine(models[model], pages=16, max_model_len=64, self_check=True, **options)
    assert engine.plan.linear_method == method
    assert agrees(engine)
    found = errors(engine, models["float32"])
    print(model, options, {name: round(error, 4) for name, error in found.items()})
    for name, error in found.items():
        assert error < (embedding_error if name in ("embedding", "head") else linear_error), name


@native
def test_a_mixed_file_keeps_each_type_in_the_storage_that_holds_it(models) -> None:
    engine = build_engine(models["Q4_K_M"], pages=4, max_model_len=32)
    plain = build_yardstick(models["Q4_K_M"], pages=4, max_model_len=32)
    for name, layer in matrices(engine).items():
        wanted = matrices(plain)[name].dequantized()
        error = float((layer.dequantized() - wanted).norm() / wanted.norm())
        assert error < (0.006 if name in ("qkv", "head") else 7e-4), name
    rows = engine.model.weights.layers[0].qkv.num_bytes
    assert rows == (256 + 64) * 256 // 32 * 20 + 64 * 256 // 32 * 34  # q, k in 4 bits, v in 8


@native
@pytest.mark.parametrize("quantization", ["auto", "int4", "int8"])
def test_q4_0_is_kept_in_no_more_bytes_than_its_file_has(models, quantization) -> None:
    engine = build_engine(models["Q4_0"], pages=4, max_model_len=32, quantization=quantization)
    plain = build_yardstick(models["Q4_0"], pages=4, max_model_len=32)
    for name, layer in matrices(engine).items():
        wanted = matrices(plain)[name].dequantized()
        assert torch.equal(layer.dequantized(), wanted), name
        rows, inputs = wanted.shape
        assert layer.num_bytes == -(-rows // 8) * 8 * inputs // 32 * 18, name


@native
def test_floats_in_a_quantized_file_are_not_rounded(models, tmp_path) -> None:
    path = tmp_path / "mixed.gguf"
    tiny_models.to_gguf(
        models["float32"], path, lambda name, shape: "F16" if "lm_head" in name else "Q8_0"
    )
    engine = build_engine(path, pages=4, max_model_len=32, self_check=True)
    assert engine.plan.linear_method == "int8"
    head = engine.model.weights.lm_head.dequantized()
    assert torch.equal(head, engine.checkpoint.read("lm_head.weight").float())


@native
@pytest.mark.parametrize("model", ["Q4_0", "Q4_K_M", "Q6_K"])
def test_answers_of_quantized_files_are_those_of_the_dequantized_file(models, model) -> None:
    requests = [request(str(i), range(7 * i, 7 * i + 20), max_tokens=1, logprobs=3) for i in (1, 2)]
    ours = run(build_engine(models[model], pages=16, max_model_len=64), requests)
    plain = run(build_yardstick(models[model], pages=16, max_model_len=64), requests)
    for name, answer in plain.items():
        gap = abs(answer.logprobs[0].logprob - ours[name].logprobs[0].logprob)
        assert gap < 0.05


@torch_int8
@pytest.mark.parametrize("model", ["bfloat16", "Q8_0", "Q4_K_M"])
def test_torch_serves_8_bits_without_kernels_of_ours(models, model) -> None:
    options: dict[str, Any] = {"attention_backend": "torch_sdpa", "ops": "torch"}
    options |= {"linear_method": "torch_int8", "quantization": "int8"}
    engine = build_engine(models[model], pages=16, max_model_len=64, self_check=True, **options)
    assert agrees(engine)
    assert max(errors(engine, models["float32"]).values()) < (0.1 if "4" in model else 0.01)
    requests = [request(str(i), range(9 * i, 9 * i + 9), max_tokens=8) for i in range(3)]
    alone = run_alone(engine, requests)
    together = run(engine, requests)
    assert {k: a.token_ids for k, a in together.items()} == {
        k: a.token_ids for k, a in alone.items()
    }
