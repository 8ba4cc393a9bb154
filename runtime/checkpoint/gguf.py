"""A GGUF file as a checkpoint.

Hugging Face names, dequantized weights, and the tokenizer it carries.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..collector import paused
from ..errors import ModelError
from .dequantize import dequantize
from .gguf_config import read_gguf_config
from .gguf_file import GgufFile
from .gguf_text import (
    TEMPLATE,
    check_gguf_text,
    gguf_templates,
    gguf_text_facts,
    gguf_tokenizer,
)
from .rope import scaling_fact
from .templates import choose_template, no_template_fact
from .tensor_check import check_tensors

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...kernels.cpu.packed import StoredBlocks
    from ..chat_template import ChatTemplate
    from ..tokenizer import Tokenizer

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NO_WEIGHTS = ("rope_freqs.weight",)  # read by the config, not by the model


class GgufCheckpoint:
    """A model in one GGUF file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.file = GgufFile(path)
        self.config = read_gguf_config(self.file)
        self._names = {
            huggingface_name(stored): stored
            for stored in self.file.tensors
            if stored not in _NO_WEIGHTS
        }
        shapes = {name: self.file.tensors[stored].shape for name, stored in self._names.items()}
        self.text_facts = check_tensors(self.config, shapes, str(path))
        check_gguf_text(self.file)
        self.text_facts += scaling_fact(self.config.rope, self.config.max_position)
        self.text_facts += gguf_text_facts(self.file)
        self._templates = gguf_templates(self.file)
        if not self._templates:
            self.text_facts.append(no_template_fact(name))

    def tensor_names(self) -> frozenset[str]:
        """All tensors, under their Hugging Face names."""
        return frozenset(self._names)

    def has(self, name: str) -> bool:
        """Whether the file has that tensor (a tied output layer is absent)."""
        return name in self._names

    def read(self, name: str) -> torch.Tensor:
        """One tensor; quantized types as float32, plain ones in their stored type."""
        if name not in self._names:
            raise ModelError(f"{self.path} has no tensor {name}.")
        stored = self.file.tensors[self._names[name]]
        tensor = dequantize(self.file.bytes_of(stored), stored.type, stored.shape)
        if self.config.architecture == "llama" and ".q_proj." in name:
            return _unpermute(tensor, self.config.num_heads)
        if self.config.architecture == "llama" and ".k_proj." in name:
            return _unpermute(tensor, self.config.num_kv_heads)
        return tensor

    def read_blocks(self, name: str) -> StoredBlocks | None:
        """A quantized matrix as it lies in the file, without a copy; None where it is plain."""
        import numpy as np

        from ...kernels.cpu.packed import STORED_TYPES, StoredBlocks

        stored = self.file.tensors[self._names[name]]
        if stored.type not in STORED_TYPES or len(stored.shape) != 2:
            return None
        rows, inputs = stored.shape
        return StoredBlocks(
            data=np.frombuffer(self.file.bytes_of(stored), dtype=np.uint8),
            type=stored.type,
            shape=(rows, inputs),
            row_order=self._row_order(name, rows),
        )

    def release(self) -> None:
        """Let the system take the memory of what was read; it is read again where it is needed."""
        self.file.release()

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """For each row its place in the file, where the file has them in another order."""
        import torch

        if self.config.architecture != "llama":
            return None
        heads = {".q_proj.": self.config.num_heads, ".k_proj.": self.config.num_kv_heads}
        for part, num_heads in heads.items():
            if part in name:
                return _unpermute(torch.arange(rows, dtype=torch.int32), num_heads).numpy()
        return None

    def tokenizer(self) -> Tokenizer:
        """The file's own tokenizer, built once."""
        return self._tokenizer

    def chat_template(self, override: str | None = None) -> ChatTemplate | None:
        """The file's chat template, or the user's own; None when there is none."""
        source = f"{TEMPLATE} of {self.path.name}"
        return choose_template(override, self._templates, source, self._tokenizer.special_tokens)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        with paused():
            return gguf_tokenizer(self.file, self.config.eos_ids, self.config.vocab_size)


def huggingface_name(stored: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`.

    Unknown names stay as they are.
    """
    stem, _, kind = stored.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{kind}"
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{parts[1]}.{parts[2]}.{kind}"
    return stored


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows back in order: llama.cpp interleaves the halves of each rotated head for arch llama."""
    rows, rest = tensor.shape[0], tensor.shape[1:]
    return (
        tensor.reshape(num_heads, rows // num_heads // 2, 2, *rest)
        .transpose(1, 2)
        .reshape(tensor.shape)
    )
