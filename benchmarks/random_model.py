"""A GGUF with the shape of a known model and random weights, for speed at sizes that no package
ships.

    .venv/bin/python benchmarks/random_model.py /tmp/llama-1b-q4_1.gguf --type Q4_1

Both Polypath and llama.cpp load it. Text and vocabulary are SmolLM2's; its tokens are filled up to
the shape's vocabulary with unused ones. What it says is noise. Not to be kept in git.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_out import GgufOut

from polypath.runtime.checkpoint.gguf_file import GgufFile
from polypath.runtime.checkpoint.source import default_model

GROUP = 32
UNUSED = 5  # token type of GGUF


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    context: int

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name, rows, columns) of every matrix; the head is the embedding."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd", self.vocab, self.hidden
        for i in range(self.layers):
            yield f"blk.{i}.attn_q", q, self.hidden
            yield f"blk.{i}.attn_k", kv, self.hidden
            yield f"blk.{i}.attn_v", kv, self.hidden
            yield f"blk.{i}.attn_output", self.hidden, q
            yield f"blk.{i}.ffn_gate", self.inner, self.hidden
            yield f"blk.{i}.ffn_up", self.inner, self.hidden
            yield f"blk.{i}.ffn_down", self.hidden, self.inner

    def vectors(self) -> Iterator[str]:
        """Names of the norms."""
        yield "output_norm"
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm"
            yield f"blk.{i}.ffn_norm"


SHAPES = {
    "llama-3.2-1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, 500_000.0, 8192),
    "tiny": Shape(128, 256, 2, 4, 2, 32, 49_152, 10_000.0, 512),
}


def blocks(type_name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Random 4-bit blocks uint8 [rows, bytes]; weights have mean 0 and variance 1 / columns."""
    count = rows * columns // GROUP
    scale = np.float16(1 / (4.61 * columns**0.5))  # 4.61: deviation of 0..15
    scales = [scale] if type_name == "Q4_0" else [scale, np.float16(-7.5 * float(scale))]
    head = np.frombuffer(np.array(scales, dtype=np.float16).tobytes(), dtype=np.uint8)
    out = np.empty((count, head.size + GROUP // 2), dtype=np.uint8)
    out[:, : head.size] = head
    out[:, head.size :] = rng.integers(0, 256, (count, GROUP // 2), dtype=np.uint8)
    return out.reshape(rows, -1)


def metadata(source: GgufFile, shape: Shape, name: str, file_type: int) -> dict[str, Any]:
    """SmolLM2's text part and this shape's numbers."""
    text = {k: v for k, v in source.metadata.items() if k.startswith("tokenizer.")}
    tokens, types = text["tokenizer.ggml.tokens"], text["tokenizer.ggml.token_type"]
    missing = range(len(tokens), shape.vocab)
    text["tokenizer.ggml.tokens"] = [*tokens, *(f"<|unused_{i}|>" for i in missing)]
    text["tokenizer.ggml.token_type"] = [*types, *(UNUSED for _ in missing)]
    return text | {
        "general.name": name,
        "general.file_type": file_type,
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": shape.theta,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": shape.vocab,
    }


def write(target: Path, name: str, type_name: str, seed: int) -> None:
    """The whole file."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    file_type = {"Q4_0": 2, "Q4_1": 3}[type_name]
    source = GgufFile(Path(default_model()))
    out = GgufOut(target, "llama", metadata(source, shape, f"random-{name}", file_type))
    for stem, rows, columns in shape.matrices():
        data = blocks(type_name, rows, columns, rng)
        out.add(f"{stem}.weight", type_name, (rows, columns), data)
    for stem in shape.vectors():
        ones = np.ones(shape.hidden, dtype=np.float32)
        out.add(f"{stem}.weight", "F32", ones.shape, ones)
    out.close()


def main() -> None:
    """Write the file that was asked for."""
    parser = argparse.ArgumentParser(description="A GGUF with random weights of a known shape.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--type", choices=("Q4_0", "Q4_1"), default="Q4_1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.target, args.shape, args.type, args.seed)
    print(f"{args.target}: {args.target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
