"""The same model in the forms that peers read.

    .venv/bin/python benchmarks/convert.py gguf MODEL OUT.gguf --type Q4_0
    .venv/bin/python benchmarks/convert.py folder MODEL OUT

MODEL is a GGUF file, or "" for the default model. `gguf` requantizes matrices (llama.cpp repacks
Q4_0 for this processor, Q4_1 it does not); `folder` dequantizes into a Hugging Face folder, from
which OpenVINO and CTranslate2 make their own (README.md has their commands).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gguf_out import GgufOut, quantize
from safetensors.torch import save_file

from polypath.runtime.checkpoint.dequantize import dequantize
from polypath.runtime.checkpoint.gguf import GgufCheckpoint
from polypath.runtime.checkpoint.source import open_checkpoint

FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # general.file_type


def to_gguf(checkpoint: GgufCheckpoint, target: Path, type_name: str) -> None:
    """All matrices as `type_name`, vectors and metadata as they are."""
    file = checkpoint.file
    metadata = {**file.metadata, "general.file_type": FILE_TYPES[type_name]}
    out = GgufOut(target, str(metadata["general.architecture"]), metadata)
    for tensor in file.tensors.values():
        values = dequantize(file.bytes_of(tensor), tensor.type, tensor.shape).float().numpy()
        if values.ndim == 1:
            out.add(tensor.name, "F32", tensor.shape, values)
        else:
            out.add(tensor.name, type_name, tensor.shape, quantize(values, type_name))
    out.close()


def to_folder(checkpoint: GgufCheckpoint, target: Path) -> None:
    """config.json, model.safetensors in float32, tokenizer.json."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(huggingface_config(checkpoint), indent=1))
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensor_names()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        str(target / "model.safetensors"),
        metadata={"format": "pt"},
    )
    tokenizer = checkpoint.tokenizer()
    tokenizer._backend.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def huggingface_config(checkpoint: GgufCheckpoint) -> dict[str, Any]:  # Any: plain JSON
    """The config of a Llama; other families are not needed here."""
    c = checkpoint.config
    if c.family != "llama" or c.rope.scaling != "none":
        raise SystemExit(f"only plain Llama models are converted, and {checkpoint.path} is not one")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids),
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


def main() -> None:
    """Convert as asked."""
    parser = argparse.ArgumentParser(description="The same model in the forms that peers read.")
    parser.add_argument("form", choices=("gguf", "folder"))
    parser.add_argument("model", help='a GGUF file; "" is the default model')
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=sorted(FILE_TYPES), default="Q4_0")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    if not isinstance(checkpoint, GgufCheckpoint):
        raise SystemExit(f"{args.model} is no GGUF file")
    with torch.inference_mode():
        if args.form == "gguf":
            to_gguf(checkpoint, args.target, args.type)
        else:
            to_folder(checkpoint, args.target)
    print(args.target)


if __name__ == "__main__":
    main()
