"""What a plan takes of a device's memory: weights, activations, graphs, KV pool, and a reserve.

All are upper estimates made before anything is loaded: on a CPU for the plain torch path, the
hungriest, to which a start may fall; on a card, where it costs gigabytes, for the planned one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from .capability import Capability
from .device import first_usable_gpu
from .graph_memory import graph_bytes
from .hardware import Hardware
from .plan import MemoryEstimate
from .quantization import AS_STORED, weights_bytes

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_ITEMSIZE = {**ITEMSIZE, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
MIB, GIB = 1 << 20, 1 << 30
SCRATCH_PAGES = 1  # page 0 belongs to padding
SAMPLER_BYTES = 40  # for each logit of a row: float32 logits, sorted copy with ids, float64 weights
PROMPT_LOGPROB_ROWS = 512  # rows whose logits are held at once
SPLIT_TOKENS, MOST_SPLITS = 256, 64  # of a row's keys: kernels/triton/decode_attention.py
PADDING = 2  # decode rows are padded to at most twice their own length when pages are gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory of the plan's device as probed. `limit_bytes` None: unknown, so nothing is refused."""

    limit_bytes: int | None
    origin: str
    reserve_bytes: int


def device_budget(hardware: Hardware, device: str) -> Budget:
    """What is free now. The reserve is 5%: 384 MiB to 4 GiB on a CPU, at least 1 GiB on a card.

    On a CPU, what the probing process already holds (interpreter, torch) has left both the free
    memory and the reserve, of which 128 MiB stay: planning before or after `import torch` agrees.
    """
    if device == "cuda":
        gpu = first_usable_gpu(hardware)
        assert gpu is not None, "a plan for cuda has a usable card"
        total, free, origin = gpu.total_bytes, gpu.free_bytes, f"memory of {gpu.name}"
        least, most = GIB, (total or 0) // 20 + GIB
    else:
        memory = hardware.memory
        total, free, origin = memory.total_bytes, memory.free_bytes, memory.origin
        least, most = 384 * MIB, 4 * GIB
    limit = free if free is not None else total
    if limit is None:
        return Budget(limit_bytes=None, origin="unknown", reserve_bytes=least)
    reserve = min(max((total or limit) // 20, least), most)
    if device == "cpu":
        reserve = max(reserve - hardware.memory.process_bytes, 128 * MIB)
    words = f"free of {gigabytes(total)}, {origin}" if total is not None else origin
    return Budget(limit_bytes=limit, origin=words, reserve_bytes=reserve)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a model takes with the values that are chosen; lengths are the variable."""

    model: ModelConfig
    itemsize: int  # bytes of a weight or activation
    kv_itemsize: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    method: Capability  # linear
    width: str = AS_STORED  # what weights are rounded to
    decode_sizes: tuple[int, ...] = ()  # rows of graphs of whole steps
    piece_sizes: tuple[int, ...] = ()  # tokens of graphs in pieces
    is_padded: bool = False  # a graph computes all its rows, so each size has its own
    is_loaded_here: bool = True  # what a tensor takes while it loads counts; else on the host
    is_gathered: bool = True  # attention copies keys out of their pages, and makes masks
    workspace_bytes: int = 0  # what attention backends keep for their plans
    is_split: bool = False  # decode attention keeps a result of each part of a row's keys

    @property
    def weights_bytes(self) -> int:
        """All weights as the linear method stores them."""
        return weights_bytes(self.model, self.method, self.width, self.itemsize)

    @property
    def graph_bytes(self) -> int:
        """All graphs with the pools that they run in."""
        sizes = (self.decode_sizes, self.piece_sizes, self.is_padded)
        return graph_bytes(self.model, self.itemsize, *sizes)

    @property
    def page_bytes(self) -> int:
        """One page over all layers."""
        return self.page_size * self.model.kv_bytes_per_token(self.kv_itemsize)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a pool that holds so many tokens of one request, the scratch page included."""
        return -(-num_tokens // self.page_size) + SCRATCH_PAGES

    def activation_bytes(self, max_model_len: int, num_pages: int) -> int:
        """The larger of loading the largest tensor and of the largest step."""
        model = self.model
        loading = 2 * model.vocab_size * model.hidden_size * 4 * self.is_loaded_here
        return max(loading, self._step_bytes(max_model_len) + self.gathered_bytes(num_pages))

    def gathered_bytes(self, num_pages: int) -> int:
        """Keys and values of one layer, copied out of their pages."""
        return num_pages * self._gathered_of_a_page

    @property
    def _gathered_of_a_page(self) -> int:
        copies = PADDING if self.is_gathered else 0
        return copies * self.page_bytes // max(1, self.model.num_layers)

    def _step_bytes(self, max_model_len: int) -> int:
        model, tokens = self.model, self.max_num_batched_tokens
        heads = 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        hidden = tokens * (4 * model.hidden_size + heads + 3 * model.intermediate_size)
        masks = tokens * max_model_len * (1 + model.group_size) * self.is_gathered
        logprobs = 8 * min(tokens, PROMPT_LOGPROB_ROWS)
        logits = model.vocab_size * max(SAMPLER_BYTES * self.max_num_seqs, logprobs)
        kept = self._split_bytes(max_model_len) + self.workspace_bytes
        return (hidden + masks) * self.itemsize + logits + kept

    def _split_bytes(self, max_model_len: int) -> int:
        """Results of all parts, float32, with two sums each; graphs keep some of their own."""
        parts = min(MOST_SPLITS, -(-max_model_len // SPLIT_TOKENS)) * self.is_split
        rows = self.max_num_seqs + max(self.decode_sizes, default=0)
        return rows * self.model.num_heads * parts * (self.model.head_dim + 2) * 4

    def fixed_bytes(self, max_model_len: int) -> int:
        """Weights, activations and graphs before any page is counted."""
        return self.weights_bytes + self.activation_bytes(max_model_len, 0) + self.graph_bytes

    def pages_within(self, num_bytes: int) -> int:
        """Pages that fit into so many bytes, with what gathering them takes."""
        return max(0, num_bytes) // (self.page_bytes + self._gathered_of_a_page)

    def estimate(self, max_model_len: int, num_pages: int, budget: Budget) -> MemoryEstimate:
        """All parts and their sum against the budget."""
        kv_bytes = num_pages * self.page_bytes
        activations = self.activation_bytes(max_model_len, num_pages)
        parts = self.weights_bytes + kv_bytes + activations + self.graph_bytes
        return MemoryEstimate(
            weights_bytes=self.weights_bytes,
            kv_bytes=kv_bytes,
            activation_bytes=activations,
            graph_bytes=self.graph_bytes,
            reserve_bytes=budget.reserve_bytes,
            total_bytes=parts + budget.reserve_bytes,
            limit_bytes=budget.limit_bytes,
            limit_origin=budget.origin,
        )


def gigabytes(num_bytes: int | None) -> str:
    """For sentences: "1.50 GiB", "96 MiB", "unknown"."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
