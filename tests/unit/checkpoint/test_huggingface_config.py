"""config.json: read as transformers' own classes read it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from polypath.runtime.checkpoint.config_values import ConfigValues
from polypath.runtime.checkpoint.huggingface_config import ConfigReading, read_huggingface_config
from polypath.runtime.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def of_family(family: str, **changes: Any) -> dict[str, Any]:
    """A config of that family; a change to `...` takes a key away."""
    named = {"architectures": [f"{CLASSES[family]}ForCausalLM"], "model_type": family}
    return {k: v for k, v in (LLAMA | named | changes).items() if v is not ...}


def read(config: dict[str, Any]) -> ConfigReading:
    return read_huggingface_config(ConfigValues(config, "m/config.json"))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CLASSES),
    *((family, {"num_key_value_heads": ..., "num_attention_heads": 32}) for family in CLASSES),
    *((family, {"num_key_value_heads": None}) for family in ("llama", "qwen2")),
    *((family, {"head_dim": 64}) for family in CLASSES),
    *((family, {"attention_bias": True}) for family in ("llama", "qwen3")),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("llama", {"max_position_embeddings": 77, "bos_token_id": 3, "eos_token_id": [4, 5]}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": ...}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_reads_what_transformers_reads(family: str, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = of_family(family, **changes)
    arguments = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    theirs = AutoConfig.for_model(family, **arguments)
    ours = read(config).model
    for name, key in (
        ("vocab_size", "vocab_size"),
        ("num_kv_heads", "num_key_value_heads"),
        ("max_position", "max_position_embeddings"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ):
        assert getattr(ours, name) == getattr(theirs, key), name
    hidden_per_head = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or hidden_per_head)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(theirs, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.layer_windows or [None] * 4) == windows
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.qkv_bias is (family == "qwen2" or bool(getattr(theirs, "attention_bias", False)))
    assert ours.o_bias is bool(getattr(theirs, "attention_bias", False))


def test_a_window_of_zero_is_none() -> None:
    assert read(of_family("mistral", sliding_window=0)).model.layer_windows == ()


def test_a_llama_has_no_window_and_says_so() -> None:
    reading = read(of_family("llama", sliding_window=16))
    assert reading.model.layer_windows == ()
    assert "sliding_window 16 is ignored" in reading.facts[0]


def test_remote_code_of_a_known_architecture_is_ignored_and_said() -> None:
    reading = read(of_family("llama", auto_map={"AutoModel": "code.Model"}))
    assert any("auto_map" in fact and "not run" in fact for fact in reading.facts)


def test_a_model_type_alone_is_enough() -> None:
    assert read(of_family("qwen3", architectures=...)).model.family == "qwen3"
    assert read(of_family("qwen3", model_type=...)).model.family == "qwen3"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "GPT2LMHeadModel.*unknown.*Llama.*Qwen3",
    ),
    "its code": (
        {"architectures": ["Own"], "auto_map": {"AutoModel": "x.Y"}},
        "its own code .* never run",
    ),
    "no head": ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    "neither": ({"architectures": ..., "model_type": ...}, "neither architectures nor model_type"),
    "disagreeing": ({"model_type": "qwen2"}, "must agree"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "soft cap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "no size": ({"hidden_size": ...}, "has no hidden_size"),
    "null size": ({"hidden_size": None}, "has no hidden_size"),
    "size of text": ({"hidden_size": "128"}, "hidden_size is '128'"),
    "broken size": ({"hidden_size": 128.5}, "whole number"),
    "NaN": ({"hidden_size": float("nan")}, "whole number"),
    "infinite": ({"vocab_size": float("inf")}, "whole number"),
    "negative": ({"num_hidden_layers": -1}, "at least 1"),
    "zero": ({"num_attention_heads": 0}, "at least 1"),
    "true": ({"num_attention_heads": True}, "whole number"),
    "epsilon": ({"rms_norm_eps": 0.0}, "above 0"),
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 1}, "no multiple of 3 heads"),
    "groups": ({"num_key_value_heads": 3}, "cannot share 3"),
    "odd head": ({"head_dim": 33}, "even one"),
    "flag": ({"tie_word_embeddings": "yes"}, "must be true or false"),
    "end tokens": ({"eos_token_id": ["</s>"]}, "token ids are whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    changes, found = REFUSED[name]
    with pytest.raises(ModelError, match=found) as caught:
        read(of_family("llama", **changes))
    assert "m/config.json" in str(caught.value)


WINDOWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative": ("mistral", {"sliding_window": -1}, "at least 1"),
    "mixed": ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "mixes"),
    "off but named": ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "is off"),
    "too few": ("qwen2", {"layer_types": ["full_attention"]}, "all 4 layers"),
    "kind": ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_contradicting_windows_are_refused(name: str) -> None:
    family, changes, found = WINDOWS[name]
    with pytest.raises(ModelError, match=found):
        read(of_family(family, **changes))
