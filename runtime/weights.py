"""From a checkpoint's tensors to a decoder's weights, packed by the planned linear method."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .allocator import large_blocks_apart
from .checkpoint.source import Checkpoint
from .config import ModelConfig
from .errors import ModelError
from .linear.method import Linear, LinearMethod, Stored
from .models.decoder import DecoderLayer, DecoderWeights

Progress = Callable[[float], None]


class WeightLoader:
    """Reads each tensor once, checks its shape, and packs what belongs together (q, k, v; gate,
    up). What was read of the file is given back layer by layer, so that beside the weights as they
    are stored at most one layer, or the embedding, is in memory.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        method: LinearMethod,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._method = method
        self._dtype = dtype
        self._device = device

    def load(self, on_progress: Progress | None = None) -> DecoderWeights:
        """Load everything; `on_progress` gets the share done, 0 to 1. ModelError names what is
        missing or misshapen.
        """
        with large_blocks_apart():
            return self._load(on_progress)

    def _load(self, on_progress: Progress | None) -> DecoderWeights:
        config = self._config
        embedding = self._embedding()
        self._checkpoint.release()
        layers = []
        for i in range(config.num_layers):
            layers.append(self._layer(i))
            self._checkpoint.release()
            if on_progress is not None:
                on_progress((i + 1) / (config.num_layers + 1))
        head = self._lm_head(embedding)
        self._checkpoint.release()
        if on_progress is not None:
            on_progress(1.0)
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=self._plain("model.norm.weight", config.hidden_size),
            lm_head=head,
        )

    def _embedding(self) -> Linear:
        shape = self._config.vocab_size, self._config.hidden_size
        weight = self._matrix("model.embed_tokens.weight", *shape)
        return self._method.pack_embedding(weight, is_head=self._config.tie_word_embeddings)

    def _lm_head(self, embedding: Linear) -> Linear:
        if self._config.tie_word_embeddings:
            return embedding
        shape = self._config.vocab_size, self._config.hidden_size
        return self._method.pack_head(self._matrix("lm_head.weight", *shape))

    def _layer(self, index: int) -> DecoderLayer:
        c = self._config
        at = f"model.layers.{index}"
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = [f"{at}.self_attn.{x}_proj" for x in "qkv"]
        gate_up = [f"{at}.mlp.{x}_proj" for x in ("gate", "up")]
        return DecoderLayer(
            input_norm=self._plain(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=self._linear(qkv, [q, kv, kv], c.hidden_size, c.qkv_bias),
            q_norm=self._head_norm(f"{at}.self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{at}.self_attn.k_norm.weight"),
            o=self._linear([f"{at}.self_attn.o_proj"], [c.hidden_size], q, c.o_bias),
            post_norm=self._plain(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._linear(gate_up, [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
            down=self._linear(
                [f"{at}.mlp.down_proj"], [c.hidden_size], c.intermediate_size, c.mlp_bias
            ),
        )

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self._plain(name, self._config.head_dim) if self._config.qk_norm else None

    def _linear(self, names: list[str], outs: list[int], width: int, has_bias: bool) -> Linear:
        weights = [
            self._matrix(f"{n}.weight", out, width) for n, out in zip(names, outs, strict=True)
        ]
        biases = None
        if has_bias:
            biases = [self._read(f"{n}.bias", out) for n, out in zip(names, outs, strict=True)]
        return self._method.pack(weights, biases)

    def _matrix(self, name: str, *shape: int) -> Stored:
        """As the file holds it where the method keeps blocks, else floats."""
        if self._method.keeps_blocks and self._checkpoint.has(name):
            blocks = self._checkpoint.read_blocks(name)
            if blocks is not None:
                self._check_shape(name, blocks.shape, shape)
                return blocks
        return self._read(name, *shape)

    def _plain(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._read(name, *shape)  # a copy: the file's own map is given back
        return tensor.to(device=self._device, dtype=self._dtype, copy=True).contiguous()

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        if not self._checkpoint.has(name):
            raise ModelError(
                f"{self._checkpoint.path} has no tensor {name}, which a "
                f"{self._config.architecture} needs; "
                "the file is incomplete or its config does not describe it"
            )
        tensor = self._checkpoint.read(name)
        self._check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ModelError(
                f"{name} in {self._checkpoint.path} has shape {list(found)}, "
                f"but the config asks for {list(wanted)}"
            )


def stored_bytes(config: ModelConfig, weights: DecoderWeights) -> int:
    """Bytes of all weights as they lie in memory, a tied head counted once."""
    plain = [weights.final_norm]
    linears = [weights.embedding]
    linears += [] if config.tie_word_embeddings else [weights.lm_head]
    for layer in weights.layers:
        plain += [layer.input_norm, layer.post_norm]
        plain += [n for n in (layer.q_norm, layer.k_norm) if n is not None]
        linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
    return sum(t.numel() * t.element_size() for t in plain) + sum(x.num_bytes for x in linears)
