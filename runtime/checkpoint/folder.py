"""A Hugging Face folder.

Config.json, safetensors (one file or shards) and the text files beside them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..errors import ModelError
from .config_values import ConfigValues
from .folder_text import eos_token_id, folder_templates, folder_tokenizer
from .huggingface_config import read_huggingface_config
from .json_file import read_json
from .safetensors_file import DTYPES, StoredTensor, read_header
from .templates import choose_template, no_template_fact
from .tensor_check import check_tensors

if TYPE_CHECKING:
    import torch

    from ...kernels.cpu.packed import StoredBlocks
    from ..chat_template import ChatTemplate
    from ..tokenizer import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FolderCheckpoint:
    """A model in a Hugging Face folder.

    With `weights` False only its config is needed (for a dry run of the plan).
    """

    def __init__(self, path: Path, name: str, *, weights: bool = True) -> None:
        self.path = path
        self.name = name
        config = ConfigValues(read_json(path / "config.json"), str(path / "config.json"))
        reading = read_huggingface_config(config)
        self.text_facts = list(reading.facts)
        self._tensors = _find_tensors(path) if weights else {}
        if weights:
            shapes = {tensor.name: tensor.shape for tensor in self._tensors.values()}
            self.text_facts += check_tensors(reading.model, shapes, str(path))
        self.config = self._complete(reading.model, config)
        self._templates, self._template_source = folder_templates(path)
        if not self._templates:
            self.text_facts.append(no_template_fact(name))

    def tensor_names(self) -> frozenset[str]:
        """All tensors in the folder."""
        return frozenset(self._tensors)

    def has(self, name: str) -> bool:
        """Whether the folder has that tensor."""
        return name in self._tensors

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored type."""
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name}.")
        return self._file(self._tensors[name].file).get_tensor(name)

    def read_blocks(self, name: str) -> StoredBlocks | None:
        """None: a folder of safetensors holds no blocks that we run as they are."""
        return None

    def release(self) -> None:
        """Close the maps of what was read, so that it no longer counts as this process's memory.

        A tensor that was read and is still held keeps its map.
        """
        self._open_files.clear()

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, loaded once."""
        return self._tokenizer

    def chat_template(self, override: str | None = None) -> ChatTemplate | None:
        """The folder's chat template, or the user's own; None when there is none."""
        return choose_template(
            override, self._templates, self._template_source, self._tokenizer.special_tokens
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return folder_tokenizer(self.path, self.config.eos_ids, self.config.vocab_size)

    def _file(self, path: Path) -> Any:  # safetensors.safe_open has no public type
        if path not in self._open_files:
            from safetensors import SafetensorError, safe_open

            try:
                self._open_files[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{path} cannot be read: {error}.") from None
        return self._open_files[path]

    @cached_property
    def _open_files(self) -> dict[Path, Any]:
        return {}

    def _complete(self, model: ModelConfig, config: ConfigValues) -> ModelConfig:
        """The config with what other files say: end tokens, stored type and size of the weights."""
        dtype, weight_bytes = _stored(self._tensors, model, config)
        own = eos_token_id(self.path)
        eos_ids = [*model.eos_ids, *self._generation_eos_ids(), *([] if own is None else [own])]
        return replace(
            model,
            eos_ids=tuple(dict.fromkeys(eos_ids)),
            stored_dtype=dtype,
            weight_bytes=weight_bytes,
        )

    def _generation_eos_ids(self) -> tuple[int, ...]:
        path = self.path / "generation_config.json"
        if not path.is_file():
            return ()
        return ConfigValues(read_json(path), str(path)).token_ids("eos_token_id")


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    if (path / INDEX).is_file():
        return _sharded(path)
    files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise _no_weights(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read_header(file)
    return tensors


def _sharded(path: Path) -> dict[str, StoredTensor]:
    index = path / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index} names the file {file!r}; shards must lie beside it.")
    headers = {file: read_header(path / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{path / file} lacks the tensor {name} that {index.name} promises.")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _no_weights(path: Path) -> ModelError:
    pickled = [file.name for pattern in PICKLED for file in path.glob(pattern)]
    if pickled:
        return ModelError(
            f"{path} has pickled weights only ({pickled[0]}), which could run code and are never"
            " loaded; convert them"
            " to safetensors."
        )
    return ModelError(f"{path} has no weights: no {SINGLE} and no {INDEX}; finish the download.")


def _stored(
    tensors: dict[str, StoredTensor], model: ModelConfig, config: ConfigValues
) -> tuple[str, int]:
    """(type of most weight bytes, bytes of all); from the config where there are no weights."""
    if not tensors:
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        size = {name: size for name, size in DTYPES.values()}.get(named, 4)
        return named, model.num_parameters * size
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES and tensor.name.endswith((".weight", ".bias")):
            raise ModelError(
                f"{tensor.file}: tensor {tensor.name} has type {tensor.dtype}; {', '.join(DTYPES)}"
                " are supported."
            )
        sizes[tensor.dtype] += tensor.num_bytes
    most = sizes.most_common(1)[0][0]
    return DTYPES[most][0] if most in DTYPES else most.lower(), sum(sizes.values())
