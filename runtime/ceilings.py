"""What a machine can do at most, measured with torch: the roofs that figures are shares of."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

BUFFER_FLOATS = 64 << 20  # 256 MB, far larger than any cache
SHAPES = ((512, 2048, 2048), (1024, 1024, 1024), (512, 576, 1536))  # rows, inputs, outputs
Action = Callable[[], object]
Int8Way = Callable[[int, int, int], Action]  # a product of that shape, ready to run


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The best of several measurements each, since noise only slows. An operation is a
    multiplication or an addition; one of each is a MAC.
    """

    threads: int
    read_gb_s: float  # streaming a buffer far larger than the caches
    int8_gop_s: float  # the fastest int8 product that torch has here
    fp32_gflop_s: float  # the fastest float32 product

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements of the same machine."""
        return Ceilings(
            threads=self.threads,
            read_gb_s=max(self.read_gb_s, other.read_gb_s),
            int8_gop_s=max(self.int8_gop_s, other.int8_gop_s),
            fp32_gflop_s=max(self.fp32_gflop_s, other.fp32_gflop_s),
        )


def ceilings(threads: int, repeats: int = 5) -> Ceilings:
    """Measure read bandwidth and both matrix rates with that many threads; torch has as many as
    before afterwards.
    """
    with _torch_threads(threads), torch.inference_mode():
        way = _fastest_int8()
        return Ceilings(
            threads=threads,
            read_gb_s=_read_rate(repeats) / 1e9,
            int8_gop_s=max(_int8_rate(*shape, way, repeats) for shape in SHAPES) / 1e9,
            fp32_gflop_s=max(_fp32_rate(*shape, repeats) for shape in SHAPES) / 1e9,
        )


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_rate(repeats: int) -> float:
    """Bytes/s: a sum and a matrix-vector product both only read; torch splits them differently."""
    buffer = torch.ones(BUFFER_FLOATS)
    matrix = buffer.view(8192, -1)
    vector = torch.ones(matrix.shape[1])
    seconds = min(
        _best_seconds(buffer.sum, repeats), _best_seconds(lambda: matrix.mv(vector), repeats)
    )
    return buffer.numel() * buffer.element_size() / seconds


def _fp32_rate(rows: int, inputs: int, outputs: int, repeats: int) -> float:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(x, weight), repeats)
    return 2 * rows * inputs * outputs / seconds


def _int8_rate(rows: int, inputs: int, outputs: int, way: Int8Way, repeats: int) -> float:
    seconds = _best_seconds(way(rows, inputs, outputs), repeats)
    return 2 * rows * inputs * outputs / seconds


def _fastest_int8() -> Int8Way:
    """Which of torch's ways is tuned depends on the processor; `_int_mm` may be 200 times slower
    than the others, so a small product tells.
    """
    ways = (_int_mm, partial(_dynamic_linear, True), partial(_dynamic_linear, False))
    return min(ways, key=lambda way: _best_seconds(way(256, 256, 256), 3))


def _int_mm(rows: int, inputs: int, outputs: int) -> Action:
    a = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    b = torch.randint(-127, 128, (inputs, outputs), dtype=torch.int8)
    return lambda: torch.ops.aten._int_mm(a, b)


def _dynamic_linear(reduce_range: bool, rows: int, inputs: int, outputs: int) -> Action:
    """The linear layer that also rounds its input."""
    x = torch.randn(rows, inputs)
    with warnings.catch_warnings():  # quantized tensors are deprecated, and here is no other way
        warnings.simplefilter("ignore", UserWarning)
        weight = torch.quantize_per_tensor(torch.randn(outputs, inputs), 0.03, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, reduce_range)


def _best_seconds(action: Action, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
