"""What captured graphs take beside the KV pool, estimated before anything is captured.

A graph's tensors share one pool, laid out for the largest. What a graph itself takes on a card is
from others' logs: 35 whole graphs of a model of 16 layers were 0.21 GiB (vLLM #11349), pieces 24 to
28 MiB for each size of a model of 32 (vLLM #22897). On a CPU a graph is a list of calls. The start
measures both.
"""

from __future__ import annotations

from ..config import ModelConfig

WHOLE_BYTES = 400 << 10  # of one layer in a whole graph, on a card
PIECE_BYTES = 900 << 10  # the same in pieces
CALLS_BYTES = 8 << 10  # of one layer's noted calls, on a CPU
FLOAT_BYTES = 4


def graph_bytes(
    model: ModelConfig,
    itemsize: int,
    decode_sizes: tuple[int, ...],
    piece_sizes: tuple[int, ...],
    is_padded: bool,
) -> int:
    """Bytes of all graphs with their pools; 0 without any. `itemsize`: of an activation."""
    whole, pieces = max(decode_sizes, default=0), max(piece_sizes, default=0)
    pools = live_bytes(model, itemsize, whole) + live_bytes(model, itemsize, pieces)
    logits = whole * model.vocab_size * (itemsize + FLOAT_BYTES)
    each = (WHOLE_BYTES, PIECE_BYTES) if is_padded else (CALLS_BYTES, CALLS_BYTES)
    graphs = len(decode_sizes) * each[0] + len(piece_sizes) * each[1]
    return pools + logits + graphs * model.num_layers


def live_bytes(model: ModelConfig, itemsize: int, tokens: int) -> int:
    """The tensors of one block that live at once: residual and hidden states, heads, the MLP."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    hidden = 4 * model.hidden_size + heads + 3 * model.intermediate_size
    return tokens * hidden * itemsize
