"""What a model is (`ModelConfig`) and what the user asked of an engine (`EngineConfig`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from .errors import ConfigurationError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta` and how positions are scaled.

    `linear` divides positions by `factor`; `llama3` is Llama 3.1's frequency-dependent rule, which
    also needs
    `low_freq_factor`, `high_freq_factor` and `original_max_position` (tokens).
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and rules of one dense decoder, read from its files and free of any choice of ours."""

    family: str  # one of FAMILIES; names the file in runtime/models/
    architecture: str  # as the checkpoint spells it, for messages
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens; scaling already applied where the checkpoint says so
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[
        int | None, ...
    ] = ()  # sliding window of each layer in tokens; None sees everything
    attention_soft_cap: float | None = None  # logits of attention become c * tanh(logits / c)
    attention_sinks: bool = False  # each head learned a logit that takes part in its softmax
    stored_dtype: str = (
        "float32"  # of most weight bytes: float32, float16, bfloat16, or a GGUF type such as Q4_1
    )
    weight_bytes: int = 0  # bytes of all weights as stored
    stored_types: tuple[
        tuple[str, int], ...
    ] = ()  # where types are mixed: (type, bytes), most first
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # every token id that ends an answer

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights in total, a tied embedding counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        attention += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers, at `itemsize` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the user asked for. "auto" and None mean the planner decides; all else is the user's own
    word.
    """

    model: str  # folder, .gguf file or hub id
    served_model_name: str | None = None
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, float32, bfloat16, float16: of weights and activations
    kv_dtype: str = "auto"
    runner: str = "auto"
    attention_backend: str = "auto"
    ops: str = "auto"
    linear_method: str = "auto"
    quantization: str = "auto"  # at most so many bits a weight: int8, int4; auto: as stored
    page_size: int | None = None  # tokens a page
    kv_bytes: int | None = None  # bytes of the KV pool
    memory_share: float | None = (
        None  # share of the memory left after weights that the KV pool may take, 0 to 1
    )
    max_model_len: int | None = None  # tokens of prompt and answer
    max_num_seqs: int | None = None  # requests that run at once
    max_num_batched_tokens: int | None = None  # token budget of one step
    max_waiting: int | None = None  # requests that may queue in the worker
    num_threads: int | None = None  # CPU threads of a step
    overlap_depth: int | None = None  # steps launched while one runs: 0 or 1
    flash_attn_library: str | None = None  # file of vLLM's FA3 extension, used without vLLM
    prefix_cache: bool = True
    self_check: bool = True
    calibration: bool = True  # a measured run at start, for routing and concurrency
    chat_template: str | None = None  # a jinja file, or the template itself

    def __post_init__(self) -> None:
        for name in ("page_size", "kv_bytes", "max_model_len", "max_num_seqs"):
            self._require_positive(name)
        for name in ("max_num_batched_tokens", "max_waiting", "num_threads"):
            self._require_positive(name)
        if self.overlap_depth not in (None, 0, 1):
            raise ConfigurationError(f"overlap_depth is {self.overlap_depth}; it must be 0 or 1")
        if self.memory_share is not None and not 0.0 < self.memory_share <= 1.0:
            raise ConfigurationError(
                f"memory_share is {self.memory_share}; it must be above 0 and at most 1"
            )
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigurationError(
                f"page_size is {self.page_size}; it must be a power of two such as 16"
            )

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")

    def asked(self) -> dict[str, object]:
        """The options that differ from their default: what has origin `user`."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "model" and getattr(self, f.name) != f.default
        }
