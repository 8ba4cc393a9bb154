"""A tiny model, nodes by name, and a folder that stands for the root of a file system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polypath.runtime.config import ModelConfig, RopeConfig
from polypath.runtime.planning.hardware import Hardware, load_hardware
from polypath.runtime.planning.probe_files import FactFiles

WriteFiles = Callable[[dict[str, str]], FactFiles]


@pytest.fixture
def model() -> ModelConfig:
    """SmolLM2-135M's shape, stored as bfloat16."""
    return ModelConfig(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        tie_word_embeddings=True,
        stored_dtype="bfloat16",
        weight_bytes=269_030_016,
    )


@pytest.fixture
def avx2() -> Hardware:
    """A CPU node of two cores."""
    return load_hardware("avx2")


@pytest.fixture
def write_files(tmp_path: Path) -> WriteFiles:
    """Writes files below a root of its own and gives the reader of it."""

    def write(contents: dict[str, str]) -> FactFiles:
        for name, text in contents.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return FactFiles(tmp_path)

    return write
