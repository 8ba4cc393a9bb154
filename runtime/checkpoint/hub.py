"""Models from the Hugging Face hub: what is whole in the local cache starts without any network
call.

Only safetensors, JSON and templates are fetched; pickled weights and code never are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..errors import ModelError
from .folder import FolderCheckpoint
from .folder_text import TOKENIZER

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TEXT_FILES = ["*.json", "*.jinja", "additional_chat_templates/*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
NEVER = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]
TIMEOUT_S = 3.0  # for the hub's first answer


def looks_like_hub_id(model: str) -> bool:
    """`organisation/name`; anything with more slashes, blanks, or a path's beginning is a path."""
    return HUB_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".safetensors"))


def open_hub_model(model: str, *, weights: bool = True) -> FolderCheckpoint:
    """The model of that id, from the cache or downloaded. Raises ModelError in one sentence,
    within seconds.
    """
    cached = _cached_snapshot(model)
    if cached is not None:
        try:
            return _open(model, cached, weights)
        except ModelError as error:
            if _is_offline():
                raise ModelError(f"{_stripped(error)} ({_how_to_finish(model)}).") from None
    elif _is_offline():
        raise ModelError(
            f"{model} is no local folder or file and not in the hub cache, and HF_HUB_OFFLINE is "
            "set;"
            f" {_how_to_finish(model)}."
        )
    return _open(model, _download(model, weights), weights)


def _open(model: str, folder: Path, weights: bool) -> FolderCheckpoint:
    """Opens a snapshot; a broken tokenizer is found here too, so that the download can mend it."""
    checkpoint = FolderCheckpoint(folder, model, weights=weights)
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file() or tokenizer.stat().st_size == 0:
        raise ModelError(f"{tokenizer} is missing or empty.")
    checkpoint.text_facts.insert(0, f"model: {model} of the Hugging Face hub, {folder.name[:12]}")
    return checkpoint


def _cached_snapshot(model: str) -> Path | None:
    """The snapshot that refs/main names, or the only one."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model.replace('/', '--')}"
    snapshots = repository / "snapshots"
    reference = repository / "refs" / "main"
    if reference.is_file():
        folder = snapshots / reference.read_text(encoding="utf-8").strip()
        return folder if folder.is_dir() else None
    folders = [each for each in snapshots.iterdir() if each.is_dir()] if snapshots.is_dir() else []
    return folders[0] if len(folders) == 1 else None


def _download(model: str, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(model, timeout=TIMEOUT_S)  # a fast answer, before many slow ones
        return Path(
            snapshot_download(
                model,
                allow_patterns=TEXT_FILES + (WEIGHT_FILES if weights else []),
                ignore_patterns=NEVER,
                etag_timeout=TIMEOUT_S,
            )
        )
    except HfHubHTTPError as error:
        raise ModelError(_hub_sentence(model, error)) from None
    except (*_network_errors(), OSError, HFValidationError) as error:
        reason = str(error) or type(error).__name__
        raise ModelError(
            f"{model} is no local folder or file, and the Hugging Face hub cannot be reached "
            f"({_line(reason)});"
            f" {_how_to_finish(model)}."
        ) from None


def _network_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises without a network; over the years it used three libraries."""
    bases = {"requests": "RequestException", "httpx": "HTTPError", "httpx2": "HTTPError"}
    return tuple(getattr(sys.modules[name], bases[name]) for name in bases if name in sys.modules)


def _hub_sentence(model: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{model} is a gated model: accept its terms on the hub and run hf auth login."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model} is no local folder or file, and the Hugging Face hub has no model of that "
            "name that you may see."
        )
    return f"The Hugging Face hub refused {model}: {_line(str(error))}."


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _how_to_finish(model: str) -> str:
    return f"to get it whole run hf download {model} where there is a network"


def _stripped(error: ModelError) -> str:
    return str(error).rstrip(".")


def _line(text: str) -> str:
    """The first line of a library's message."""
    return (text.strip().splitlines() or ["no reason given"])[0].rstrip(".")
