"""A model of a known shape whose weights are random and made where they are needed: no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polypath.runtime.config import ModelConfig, RopeConfig

DTYPE = torch.bfloat16


def shape(
    name: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], vocab: int
) -> ModelConfig:
    """A Llama or, with head norms, a Qwen3; `heads`: of queries, of keys, and their width."""
    config = ModelConfig(
        family="qwen3" if "qwen3" in name else "llama",
        architecture=name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_position=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        qk_norm="qwen3" in name,
        tie_word_embeddings=True,
        stored_dtype="bfloat16",
    )
    return _with_bytes(config)


def _with_bytes(config: ModelConfig) -> ModelConfig:
    from dataclasses import replace

    return replace(config, weight_bytes=config.num_parameters * DTYPE.itemsize)


SHAPES = {
    "llama-3.1-8b": shape("llama-3.1-8b", 4096, 14336, 32, (32, 8, 128), 128_256),
    "qwen3-0.6b": shape("qwen3-0.6b", 1024, 3072, 28, (16, 8, 128), 151_936),
    "tiny": shape("tiny", 128, 256, 2, (4, 2, 64), 512),
}
"""The embedding is the head too: as many bytes are read in a step as where it is not."""


class RandomCheckpoint:
    """See `Checkpoint`: what a start reads of one."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.path = Path(name)
        self.name = name
        self.config = SHAPES[name]
        self.text_facts: list[str] = []
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor_names(self) -> frozenset[str]:
        """Not needed: every tensor is there."""
        return frozenset()

    def has(self, name: str) -> bool:
        """Biases are not."""
        return not name.endswith(".bias")

    def read(self, name: str) -> torch.Tensor:
        """A matrix whose products have the variance of what goes in, or a norm of ones."""
        rows, columns = self._shape(name)
        if columns == 0:
            return torch.ones(rows, dtype=DTYPE)
        device, generator = self._generator.device, self._generator
        weight = torch.randn(rows, columns, generator=generator, device=device, dtype=DTYPE)
        return weight.mul_(columns**-0.5)

    def read_blocks(self, name: str) -> None:
        """None is quantized."""

    def release(self) -> None:
        """Nothing is held."""

    def tokenizer(self) -> Any:  # Any: there is none
        """There is no text."""
        raise NotImplementedError("random weights have no tokenizer")

    def chat_template(self, override: str | None = None) -> None:
        """There is none."""

    def _shape(self, name: str) -> tuple[int, int]:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        part = name.removesuffix(".weight").rpartition(".")[2]
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "q_proj": (q, c.hidden_size),
            "k_proj": (kv, c.hidden_size),
            "v_proj": (kv, c.hidden_size),
            "o_proj": (c.hidden_size, q),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
            "q_norm": (c.head_dim, 0),
            "k_norm": (c.head_dim, 0),
        }
        return shapes.get(part, (c.hidden_size, 0))
