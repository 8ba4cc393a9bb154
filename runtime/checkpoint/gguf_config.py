"""Metadata of a GGUF file to a `ModelConfig`."""

from __future__ import annotations

from collections import Counter

from ..config import ModelConfig
from ..errors import ModelError
from .config_values import ConfigValues
from .dequantize import PLAIN, QUANTIZED
from .gguf_file import GgufFile
from .gguf_rope import read_gguf_rope

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # Mistral calls itself llama here
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The model that the metadata describes.

    Raises ModelError for what we do not know or do not compute.
    """
    values = ConfigValues(file.metadata, str(file.path))
    arch = str(values.get("general.architecture"))
    if arch not in FAMILIES:
        raise ModelError(
            f"{file.path}: architecture {arch!r} is unknown; the known ones of GGUF files are"
            f" {', '.join(FAMILIES)}."
        )
    _refuse_split(values)
    heads = values.integer(f"{arch}.attention.head_count")
    hidden = values.integer(f"{arch}.embedding_length")
    head_dim = values.integer(f"{arch}.attention.key_length", hidden // heads)
    _refuse_unsupported(values, arch, head_dim)
    num_layers = values.integer(f"{arch}.block_count")
    window = values.get(f"{arch}.attention.sliding_window") or None
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no token_embd.weight: it holds no whole model.")
    stored_types = _stored_types(file)
    return ModelConfig(
        family=FAMILIES[arch],
        architecture=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=values.integer(f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=values.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=values.integer(f"{arch}.context_length"),
        rms_norm_eps=values.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=read_gguf_rope(file, values, arch, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        layer_windows=(window,) * num_layers if window else (),
        stored_dtype=stored_types[0][0],
        weight_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        stored_types=stored_types,
        bos_id=next(iter(values.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_ids=_eos_ids(values),
    )


def _eos_ids(values: ConfigValues) -> tuple[int, ...]:
    ids = [each for key in _END_KEYS for each in values.token_ids(f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))


def _stored_types(file: GgufFile) -> tuple[tuple[str, int], ...]:
    """(type, bytes) of all matrices by type, most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if tensor.type not in (*PLAIN, *QUANTIZED):
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has type {tensor.type}, which is not supported;"
                f" {', '.join((*PLAIN, *QUANTIZED))} are."
            )
        if len(tensor.shape) == 2:
            sizes[_PLAIN_DTYPES.get(tensor.type, tensor.type)] += tensor.num_bytes
    return tuple(sizes.most_common())


def _refuse_split(values: ConfigValues) -> None:
    parts = values.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{values.file} is one of {parts} parts of a split GGUF; merge them first (gguf-split"
            " --merge)."
        )


def _refuse_unsupported(values: ConfigValues, arch: str, head_dim: int) -> None:
    if values.get(f"{arch}.expert_count"):
        raise ModelError(f"{values.file} is a mixture of experts, which is not supported.")
    value_dim = values.integer(f"{arch}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{values.file}: keys have {head_dim} dimensions and values {value_dim}; equal ones are"
            " supported."
        )
    rotated = values.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{values.file}: {rotated} of {head_dim} dimensions of a head are rotated; only whole"
            " heads are supported."
        )
