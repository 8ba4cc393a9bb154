"""The config.json values of public models, as their makers published them, that tests plan for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polypath.runtime.checkpoint.config_values import ConfigValues
from polypath.runtime.checkpoint.huggingface_config import read_huggingface_config
from polypath.runtime.config import ModelConfig

Values = dict[str, Any]  # JSON


def _config(architecture: str, family: str, shape: tuple[int, ...], **more: Any) -> Values:
    """`shape`: hidden size, MLP, layers, heads, KV heads, vocabulary, positions."""
    hidden, mlp, layers, heads, kv_heads, vocabulary, positions = shape
    return {
        "architectures": [architecture],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, Values] = {
    "SmolLM2-135M": _config(
        *("LlamaForCausalLM", "llama", (576, 1536, 30, 9, 3, 49152, 8192)),
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": _config(
        *("LlamaForCausalLM", "llama", (2048, 8192, 16, 32, 8, 128256, 131072)),
        rope_theta=500000.0,
        rope_scaling=LLAMA3_ROPE | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": _config(
        *("LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 128256, 131072)),
        rope_theta=500000.0,
        rope_scaling=LLAMA3_ROPE,
    ),
    "Llama-3.3-70B": _config(
        *("LlamaForCausalLM", "llama", (8192, 28672, 80, 64, 8, 128256, 131072)),
        rope_theta=500000.0,
        rope_scaling=LLAMA3_ROPE,
    ),
    "Llama-2-7B": _config("LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 32000, 4096)),
    "Mistral-7B-v0.1": _config(
        *("MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32000, 32768)),
        sliding_window=4096,
    ),
    "Qwen2.5-7B": _config(
        *("Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 152064, 32768)),
        use_sliding_window=False,
    ),
    "Qwen3-0.6B": _config(
        *("Qwen3ForCausalLM", "qwen3", (1024, 3072, 28, 16, 8, 151936, 40960)),
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "Qwen3-32B": _config(
        *("Qwen3ForCausalLM", "qwen3", (5120, 25600, 64, 64, 8, 151936, 40960)),
        head_dim=128,
    ),
    "phi-2-sized Llama": _config(
        *("LlamaForCausalLM", "llama", (2560, 10240, 32, 32, 32, 51200, 2048)),
    ),
}
"""What we serve; the last has heads of 80, as Phi-2 has."""

FOREIGN: dict[str, Values] = {
    "Gemma-2-9B": _config(
        *("Gemma2ForCausalLM", "gemma2", (3584, 14336, 42, 16, 8, 256000, 8192)),
        attn_logit_softcapping=50.0,
    ),
    "gemma-3-1b": _config("Gemma3ForCausalLM", "gemma3", (1152, 6912, 26, 4, 1, 262144, 32768)),
    "gpt-oss-20b": _config("GptOssForCausalLM", "gpt_oss", (2880, 2880, 24, 64, 8, 201088, 131072)),
    "DeepSeek-V3": _config(
        *("DeepseekV3ForCausalLM", "deepseek_v3", (7168, 18432, 61, 128, 128, 129280, 163840))
    ),
    "Mixtral-8x7B": _config(
        *("MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768)),
        num_local_experts=8,
    ),
    "a capped Llama": _config(
        *("LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 32000, 8192)),
        attn_logit_softcapping=50.0,
    ),
}
"""What we do not, and refuse while its config is read."""


def read(values: Values) -> ModelConfig:
    """As a folder of that config would be read."""
    return read_huggingface_config(ConfigValues(values, "config.json")).model


def public_model(name: str, stored: str = "bfloat16", bits: float = 16.0) -> ModelConfig:
    """That model, its weights stored in `bits` each."""
    model = read(CONFIGS[name])
    size = int(model.num_parameters * bits / 8)
    return replace(model, stored_dtype=stored, weight_bytes=size)
