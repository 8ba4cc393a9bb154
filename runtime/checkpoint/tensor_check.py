"""Which tensors a model must have, and the check of a checkpoint against that list before anything
is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import ModelConfig
from ..errors import ModelError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its Hugging Face name, with its shape.

    A tied output layer is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, biased) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"self_attn.{each}_norm.weight": (config.head_dim,) for each in "qk"}
    return shapes


def check_tensors(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str
) -> list[str]:
    """Refuses missing tensors, wrong shapes and layers' tensors we would not use.

    Returns facts about ignored ones.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}: the"
            " download is incomplete,"
            " or its config does not belong to it."
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{where}: tensor {name} has the shape {list(found[name])}; the config asks for"
                f" {list(shape)}."
            )
    extra = sorted(name for name in found if name not in expected and not _harmless(name, config))
    used = tuple(f"model.layers.{index}." for index in range(config.num_layers))
    for name in extra:
        if name.startswith(used):
            raise ModelError(
                f"{where} has the tensor {name}, which a {config.architecture} of this config does"
                " not use; the"
                " result would be wrong."
            )
    return [f"{len(extra)} tensors of {where} are not used, first {extra[0]}"] if extra else []


def _harmless(name: str, config: ModelConfig) -> bool:
    """Buffers that older versions saved, and the copy of a tied output layer."""
    return name.endswith(("rotary_emb.inv_freq", "attn.masked_bias")) or (
        name == HEAD and config.tie_word_embeddings
    )
