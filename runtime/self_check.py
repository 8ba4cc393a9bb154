"""At start: the paged, chunked, batched path of each mode against one plain unpaged forward of the
same stored weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from ..kernels.rms_norm import rms_norm
from ..kernels.rotary import cos_sin, rotate
from ..kernels.silu_mul import silu_mul
from .allocator import give_back
from .errors import EngineError
from .forward_batch import ForwardBatch
from .kv.pages import Pages
from .linear.method import Linear
from .model_runner import ModelRunner
from .models.decoder import Decoder, DecoderLayer, rope_frequencies
from .planning.plan import ExecutionPlan
from .request import Request
from .scheduler import RequestState, ScheduledRow

BOUNDS = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
"""Largest difference of logits allowed, relative to the largest logit, by dtype."""

ROUNDED_ACTIVATIONS = 6e-2
"""The bound where a linear method rounds activations to 8 bits in groups of 32."""

TWO_NUMBERS = 5e-3
"""The bound where torch_int8 rounds activations to two numbers of 7 bits."""

PROMPT_TOKENS = 16
DECODES = 4


class SelfCheckError(EngineError):
    """A planned path differs from the plain forward by more than its bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheckResult:
    """What was compared: `error` and `bound` relative to the largest logit of the plain forward."""

    passed: bool
    error: float
    bound: float
    seconds: float
    tokens: int

    def sentence(self) -> str:
        """One line for the start-up display and the plan's events."""
        verdict = "agrees with" if self.passed else "differs from"
        return (
            f"the planned path {verdict} a plain forward on {self.tokens} tokens "
            f"(error {self.error:.1e}, bound {self.bound:.0e})"
        )


def bound_of(plan: ExecutionPlan) -> float:
    """The difference that the plan's dtype and linear method allow."""
    if plan.linear_method in ("int4_group", "int8"):
        return ROUNDED_ACTIVATIONS
    return TWO_NUMBERS if plan.linear_method == "torch_int8" else BOUNDS[plan.dtype]


@torch.inference_mode()
def self_check(
    model: Decoder,
    runner: ModelRunner,
    pages: Pages,
    *,
    bound: float,
    max_model_len: int,
    prompt_tokens: int = PROMPT_TOKENS,
    decodes: int = DECODES,
    copies: int = 2,
) -> SelfCheckResult:
    """Run ragged copies of one request through chunks and batched decodes, teacher-forced, and
    compare every logit row.
    """
    start = time.monotonic()
    give_back()  # gaps that loading and capturing left would lie beside the copies made here
    room = pages.num_usable // copies * pages.page_size
    length = max(1, min(prompt_tokens + decodes, max_model_len - 1, room))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
    expected = plain_forward(model, ids)
    steps = _staggered(_chunks(length, min(decodes, length - 1)), copies)
    error = _paged_error(model, runner, pages, ids, expected, steps)
    return SelfCheckResult(
        passed=error <= bound,
        error=error,
        bound=bound,
        seconds=time.monotonic() - start,
        tokens=length,
    )


def plain_forward(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Logits float32 [T, V] of one sequence without pages, batches or chunks, by the dequantized
    weights.
    """
    config, weights = model.config, model.weights
    device = weights.final_norm.device
    positions = torch.arange(len(token_ids), device=device)
    rope = cos_sin(positions, rope_frequencies(config.rope, config.head_dim).to(device))
    x = weights.embedding.rows(torch.tensor(token_ids, device=device)).to(weights.final_norm.dtype)
    windows = config.layer_windows or (None,) * config.num_layers
    for layer, window in zip(weights.layers, windows, strict=True):
        normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
        attended = _plain_attention(model, layer, normed, rope, positions, window)
        x = x + _apply(layer.o, attended, config.hidden_size)
        normed = rms_norm(x, layer.post_norm, config.rms_norm_eps)
        gate_up = _apply(layer.gate_up, normed, 2 * config.intermediate_size)
        x = x + _apply(layer.down, silu_mul(gate_up), config.hidden_size)
    x = rms_norm(x, weights.final_norm, config.rms_norm_eps)
    return _apply(weights.lm_head, x, config.vocab_size, torch.float32)


def _apply(
    layer: Linear, x: torch.Tensor, num_outputs: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x W^T + bias [T, num_outputs], by pieces of the dequantized matrix that do not go to memory
    and back. The outputs' place is taken first: parts that outlive the copies of weights would lie
    in the gaps that the next copies need.
    """
    y = torch.empty(x.shape[0], num_outputs, dtype=dtype or x.dtype, device=x.device)
    bias = layer.bias
    first = 0
    for piece in layer.pieces():
        last = first + piece.shape[0]
        its_bias = None if bias is None else bias[first:last]
        y[:, first:last] = linear(x, piece.to(x.dtype), its_bias)
        first = last
    assert first == num_outputs, "a layer has as many rows as the model's shapes say"
    return y


def _plain_attention(
    model: Decoder,
    layer: DecoderLayer,
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    config = model.config
    n, k = config.num_heads, config.num_kv_heads
    heads = _apply(layer.qkv, x, (n + 2 * k) * config.head_dim).view(x.shape[0], n + 2 * k, -1)
    q_TND, k_TKD, v_TKD = heads.split((n, k, k), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_TND = rms_norm(q_TND, layer.q_norm, config.rms_norm_eps)
        k_TKD = rms_norm(k_TKD, layer.k_norm, config.rms_norm_eps)
    q_TND, k_TKD = rotate(q_TND, *rope), rotate(k_TKD, *rope)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        q_TND.transpose(0, 1),
        k_TKD.repeat_interleave(config.group_size, dim=1).transpose(0, 1),
        v_TKD.repeat_interleave(config.group_size, dim=1).transpose(0, 1),
        attn_mask=visible,
    )
    return out.transpose(0, 1).reshape(x.shape[0], -1)


def _paged_error(
    model: Decoder,
    runner: ModelRunner,
    pages: Pages,
    ids: list[int],
    expected: torch.Tensor,
    steps: Sequence[Sequence[int]],
) -> float:
    """Largest relative difference over all `steps` (tokens of each copy of the sequence)."""
    states = [
        RequestState(Request(id=str(i), prompt_ids=tuple(ids)), i, len(ids) + 1)
        for i in range(len(steps[0]))
    ]
    worst = 0.0
    scale = expected.abs().max().clamp_min(1e-30)
    try:
        for state in states:
            for _ in range(pages.pages_for(len(ids))):
                page = pages.allocate()
                assert page is not None, "the self-check runs on an empty pool"
                state.pages.append(page)
        for counts in steps:
            rows = [ScheduledRow(s, n) for s, n in zip(states, counts, strict=True) if n]
            batch = ForwardBatch.build(
                rows, page_size=pages.page_size, device=model.weights.final_norm.device
            )
            batch = batch.with_logits_rows(range(batch.num_tokens))
            logits, _, _ = runner.forward(batch)
            difference = (logits.values - expected[batch.positions]).abs().max() / scale
            worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
            for row in rows:
                row.state.num_computed += row.num_tokens
    finally:
        for state in states:
            pages.release(state.pages)
    return worst


def _chunks(length: int, decodes: int) -> list[int]:
    """Tokens of each step of one copy: its prompt in two parts, then decodes."""
    prompt = max(1, length - decodes)
    cut = (prompt + 1) // 2
    return [cut, *([prompt - cut] if prompt > cut else []), *[1] * (length - prompt)]


def _staggered(chunks: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """Steps of all copies, each one step behind the one before: prefills, mixed steps, decodes."""
    late = [[*[0] * i, *chunks] for i in range(copies)]
    return list(zip_longest(*late, fillvalue=0))
