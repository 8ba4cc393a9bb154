"""Rotary settings: every spelling gives transformers' frequencies, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polypath.runtime.checkpoint.config_values import ConfigValues
from polypath.runtime.checkpoint.gguf_rope import llama3_factors
from polypath.runtime.checkpoint.huggingface_config import read_huggingface_config
from polypath.runtime.config import RopeConfig
from polypath.runtime.errors import ModelError
from polypath.tests.unit.checkpoint.test_huggingface_config import of_family

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 5e5},
    "null": {"rope_scaling": None, "rope_theta": 1e4},
    "empty": {"rope_scaling": {}, "rope_parameters": {}},
    "default": {"rope_scaling": {"rope_type": "default"}},
    "default parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "theta in parameters": {"rope_parameters": {"rope_theta": 1e6}},
    "both thetas": {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, **LINEAR}},
    "old linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "new linear": {"rope_scaling": LINEAR, "rope_theta": 1e5},
    "linear twice named": {"rope_scaling": {"type": "linear", **LINEAR}},
    "linear parameters": {"rope_parameters": {**LINEAR, "rope_theta": 1e5}},
    "linear twice": {"rope_scaling": LINEAR, "rope_parameters": LINEAR},
    "linear whole": {"rope_scaling": {"rope_type": "linear", "factor": 4}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    "old llama3": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3 parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    "llama3 without its length": {
        "rope_scaling": {"rope_type": "llama3"} | {k: LLAMA3[k] for k in list(LLAMA3)[:3]},
    },
    "llama3 length beside": {
        "original_max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "llama3"} | {k: LLAMA3[k] for k in list(LLAMA3)[:3]},
    },
}


def rope_of(**changes: Any) -> RopeConfig:
    config = of_family("llama", max_position_embeddings=512, **changes)
    return read_huggingface_config(ConfigValues(config, "m/config.json")).model.rope


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.scaling == "llama3":
        return plain / torch.tensor(llama3_factors(rope, head_dim))
    return plain / rope.factor


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_gives_transformers_frequencies(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    changes = SPELLINGS[name]
    config = of_family("llama", max_position_embeddings=512, **changes)
    arguments = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**arguments)).inv_freq
    ours = frequencies(rope_of(**changes), 32)
    assert torch.allclose(ours.float(), theirs.float(), rtol=1e-5, atol=0)


def test_the_context_is_not_widened_and_that_is_said() -> None:
    config = of_family("llama", max_position_embeddings=512, rope_scaling=LINEAR)
    reading = read_huggingface_config(ConfigValues(config, "m/config.json"))
    assert reading.model.max_position == 512
    assert "512 tokens" in reading.facts[0] and "does not widen" in reading.facts[0]


def test_equal_settings_of_all_layer_types_are_one_setting() -> None:
    nested = {"full_attention": LINEAR, "sliding_attention": LINEAR}
    config = of_family(
        "qwen2",
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
        rope_parameters=nested,
    )
    rope = read_huggingface_config(ConfigValues(config, "m/config.json")).model.rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: ({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, f"'{kind}' is not supported")
        for kind in ("yarn", "dynamic", "longrope", "mrope", "banana", "su", "proportional")
    },
    "old yarn": ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
    "mrope sections": (
        {"rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]}},
        "'mrope' is not supported",
    ),
    "two types": ({"rope_scaling": {"type": "yarn", **LINEAR}}, "type is 'yarn' and rope_type is"),
    "two sections": (
        {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}},
        "contradict",
    ),
    "on and off": (
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        "contradict",
    ),
    "two thetas": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "remove the wrong"),
    "factor 0": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    "factor below 1": ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
    "negative factor": ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "above 0"),
    "factor NaN": ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "finite"),
    "factor of text": (
        {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
        "must be a number",
    ),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
    "no type": ({"rope_scaling": {"factor": 2.0}}, "has a factor but no rope_type"),
    "llama3 without numbers": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "has no low_freq_factor",
    ),
    "llama3 order": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "must be above low_freq_factor",
    ),
    "llama3 two lengths": (
        {
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "original_max_position_embeddings": 128,
        },
        "remove the wrong",
    ),
    "theta 0": ({"rope_theta": 0}, "above 0"),
    "a list": ({"rope_scaling": ["linear", 2]}, "must be an object"),
    "partial inside": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    "nested, no layer types": ({"rope_parameters": {"full_attention": LINEAR}}, "not named"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused_by_name(name: str) -> None:
    changes, found = REFUSED[name]
    with pytest.raises(ModelError, match=found) as caught:
        rope_of(**changes)
    assert "m/config.json" in str(caught.value)


def test_different_settings_of_layer_types_are_refused() -> None:
    nested = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}
    config = of_family(
        "qwen2",
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
        rope_parameters=nested,
    )
    with pytest.raises(ModelError, match="differs between layer types"):
        read_huggingface_config(ConfigValues(config, "m/config.json"))
