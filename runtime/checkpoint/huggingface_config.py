"""config.json of a Hugging Face folder to a `ModelConfig`, with the defaults of transformers 5.24's
own config classes.

What a checkpoint asks for and we do not compute is refused here, by name, before any weight is
read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import FAMILIES, ModelConfig
from ..errors import ModelError
from .config_values import ConfigValues
from .rope import read_rope, scaling_fact

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What each family's config class in transformers assumes when the key is absent.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as heads
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28

_MUST_BE_ABSENT = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_soft_cap",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "no_rope_layers",
)
_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigReading:
    """What a config says: the model, and one-line facts worth showing at start."""

    model: ModelConfig
    facts: tuple[str, ...] = ()


def read_huggingface_config(config: ConfigValues) -> ConfigReading:
    """The model that a config.json describes.

    Raises ModelError for what we do not know or do not compute.
    """
    architecture, family = _architecture(config)
    _refuse_unsupported(config)
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings", _DEFAULT_MAX_POSITION[family])
    windows, facts = _windows(config, family, num_layers)
    layer_types = tuple(_FULL if window is None else _WINDOWED for window in windows)
    rope = read_rope(config, max_position, layer_types if family.startswith("qwen") else ())
    facts += scaling_fact(rope, max_position)
    if config.get("auto_map") is not None:
        facts.append(f"{config.file} names remote code (auto_map); it is not run")
    heads = config.integer("num_attention_heads")
    model = ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(config, family, heads),
        head_dim=_head_dim(config, family, heads),
        max_position=max_position,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=_biased(config, family),
        o_bias=family in ("llama", "qwen3") and config.flag("attention_bias"),
        mlp_bias=family == "llama" and config.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        layer_windows=windows if any(windows) else (),
        bos_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_ids=config.token_ids("eos_token_id"),
    )
    if model.num_heads % model.num_kv_heads:
        raise ModelError(
            f"{config.file}: {model.num_heads} attention heads cannot share"
            f" {model.num_kv_heads} key/value heads evenly."
        )
    return ConfigReading(model=model, facts=tuple(facts))


def _architecture(config: ConfigValues) -> tuple[str, str]:
    """(architecture as spelled, family).

    `architectures` and `model_type` must agree where both are there.
    """
    named, model_type = config.get("architectures"), config.get("model_type")
    architecture = named[0] if isinstance(named, list) and named else None
    known = ", ".join(ARCHITECTURES)
    code = "; its own code (auto_map) is never run" if config.get("auto_map") is not None else ""
    if architecture is None and model_type is None:
        raise ModelError(
            f"{config.file} has neither architectures nor model_type; the known architectures are"
            f" {known}."
        )
    family = ARCHITECTURES.get(str(architecture)) if architecture is not None else model_type
    if family not in FAMILIES:
        raise ModelError(
            f"{config.file}: architecture {architecture or model_type!r} is unknown{code}; the"
            f" known ones are {known}."
        )
    if model_type is not None and model_type != family:
        raise ModelError(
            f"{config.file}: architectures says {architecture} but model_type says {model_type!r};"
            " they must agree."
        )
    return str(architecture or model_type), family


def _refuse_unsupported(config: ConfigValues) -> None:
    activation = config.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise ModelError(f"{config.file}: hidden_act is {activation!r}; silu is supported.")
    for key in _MUST_BE_ABSENT:
        value = config.get(key)
        if value:
            raise ModelError(f"{config.file}: {key} is {value!r}, which is not supported.")
    quantization = config.section("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") or "unnamed"
        raise ModelError(
            f"{config.file}: the weights are quantized ({method}), which is not supported; use the"
            " unquantized"
            " model, or a GGUF of type Q8_0, Q4_0 or Q4_1."
        )


def _kv_heads(config: ConfigValues, family: str, heads: int) -> int:
    """Given; the class's default when absent; one per head when null."""
    is_null = "num_key_value_heads" in config.values
    default = heads if is_null else _DEFAULT_KV_HEADS.get(family, heads)
    return config.integer("num_key_value_heads", default)


def _head_dim(config: ConfigValues, family: str, heads: int) -> int:
    """Given, or 128 for Qwen3 (its class's default), or hidden size over heads."""
    hidden = config.integer("hidden_size")
    if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
        raise ModelError(f"{config.file}: hidden_size {hidden} is no multiple of {heads} heads.")
    head_dim = config.integer("head_dim", 128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise ModelError(
            f"{config.file}: head_dim is {head_dim}; rotary positions need an even one."
        )
    return head_dim


def _biased(config: ConfigValues, family: str) -> bool:
    """Qwen2 always has biases on q, k, v; Llama and Qwen3 when they say so; Mistral never."""
    return family == "qwen2" or (family != "mistral" and config.flag("attention_bias"))


def _windows(
    config: ConfigValues, family: str, num_layers: int
) -> tuple[tuple[int | None, ...], list[str]]:
    """The window of each layer in tokens, and facts. 0 and null mean none."""
    given = config.values.get("sliding_window", _DEFAULT_WINDOW if family != "llama" else None)
    window = None if given in (None, 0) else config.integer("sliding_window", _DEFAULT_WINDOW)
    if family == "llama":
        ignored = [f"{config.file}: sliding_window {window} is ignored, as Llama has none"]
        return (None,) * num_layers, ignored if window else []
    if family == "mistral":
        _refuse_mixed_layers(config)
        return (window,) * num_layers, []
    if not config.flag("use_sliding_window"):
        window = None
    kinds = _layer_kinds(config, num_layers, window)
    if window is None and _WINDOWED in kinds:
        raise ModelError(
            f"{config.file}: layer_types names {_WINDOWED}, but use_sliding_window or"
            " sliding_window is off."
        )
    return tuple(window if kind == _WINDOWED else None for kind in kinds), []


def _layer_kinds(config: ConfigValues, num_layers: int, window: int | None) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return [
            _WINDOWED if window is not None and layer >= first else _FULL
            for layer in range(num_layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{config.file}: layer_types must list all {num_layers} layers.")
    for kind in kinds:
        if kind not in (_WINDOWED, _FULL):
            raise ModelError(
                f"{config.file}: layer type {kind!r} is not supported; {_FULL} and {_WINDOWED} are."
            )
    return kinds


def _refuse_mixed_layers(config: ConfigValues) -> None:
    kinds = set(config.get("layer_types") or ())
    if len(kinds) > 1:
        raise ModelError(
            f"{config.file}: layer_types mixes {', '.join(sorted(map(str, kinds)))}; a Mistral has"
            " one kind."
        )
