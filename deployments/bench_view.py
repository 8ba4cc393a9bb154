"""How `polypath bench engine` shows its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from ..runtime.bench import Measurement, Workload, median
from ..runtime.ceilings import Ceilings
from ..runtime.roofline import Bound, ModelCost

OURS = "polypath"
COLUMNS = (
    *("workload", "engine", "prefill", "of roof", "decode", "of roof", "step ms", "forward"),
    *("host", "runs", "spread"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rate as a share of its roofline (runtime/roofline.py)."""

    share: float
    bound: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine at one workload: the medians, and how far single runs lie apart (largest over
    smallest rate).
    """

    engine: str
    is_busy: bool  # whether other processes kept cores busy
    runs: int
    spread: float
    median: Measurement
    prefill_roofline: Share | None = None  # of our own engines only: peers store other bytes
    decode_roofline: Share | None = None

    @classmethod
    def of(cls, engine: str, runs: list[Measurement], is_busy: bool = False) -> Row:
        """Sum up the runs."""
        rates = [run.decode_tokens_s or run.prefill_tokens_s for run in runs]
        return cls(
            engine=engine,
            is_busy=is_busy,
            runs=len(runs),
            spread=max(rates) / min(rates),
            median=median(runs),
        )

    @property
    def is_ours(self) -> bool:
        """Whether one of our engines made it."""
        return self.engine.split()[0] == OURS

    @property
    def rate(self) -> float:
        """What the workload is about: decode where it decodes, else prefill."""
        return self.median.decode_tokens_s or self.median.prefill_tokens_s

    def with_roofline(self, cost: ModelCost, top: Ceilings, budget: int) -> Row:
        """The same row with its shares; `budget` are the tokens of one step."""
        w, m = self.median.workload, self.median
        prefill = cost.prefill(w.batch, w.prompt_tokens, budget)
        least, bound = prefill.roofline(top, is_int8=cost.is_int8)
        share = least * m.prefill_tokens_s / (w.batch * w.prompt_tokens)
        row = replace(self, prefill_roofline=Share(share=share, bound=bound))
        if not m.decode_tokens_s:
            return row
        least, bound = cost.decode(w.batch, w.context).roofline(top, is_int8=cost.is_int8)
        share = least * m.decode_tokens_s / w.batch
        return replace(row, decode_roofline=Share(share=share, bound=bound))


def render_bench(rows: list[Row], footer: list[str]) -> None:
    """Print one line a row, ours against the best peer, the runners, and what it ran on."""
    table = Table(title="medians; tokens/s over the whole batch")
    for name in COLUMNS:
        is_text = name in ("workload", "engine")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    ordered = sorted(rows, key=lambda r: (_order(r.median.workload), r.is_busy))
    for row in ordered:
        table.add_row(*_cells(row))
    console = Console(width=max(140, Console().width))
    console.print(table)
    for line in [*_ratios(ordered), *_busy_ratios(ordered), *_steps(ordered), *footer]:
        console.print(line, highlight=False)


def ceilings_line(top: Ceilings) -> str:
    """The roofs, in a sentence."""
    return (
        f"{top.threads} threads; read {top.read_gb_s:.1f} GB/s, int8 {top.int8_gop_s:.0f} GOP/s, "
        f"fp32 {top.fp32_gflop_s:.0f} GFLOP/s"
    )


def label(workload: Workload) -> str:
    """Such as "prefill 512" or "batch 8, 64 + 64"."""
    w = workload
    if w.new_tokens == 1:
        return f"prefill {w.prompt_tokens}" + (f" x {w.batch}" if w.batch > 1 else "")
    return f"batch {w.batch}, {w.prompt_tokens} + {w.new_tokens}"


def _cells(row: Row) -> list[str]:
    m = row.median
    return [
        label(m.workload) + (", busy" if row.is_busy else ""),
        row.engine,
        f"{m.prefill_tokens_s:.1f}",
        _percent(row.prefill_roofline),
        f"{m.decode_tokens_s:.1f}" if m.decode_tokens_s else "",
        _percent(row.decode_roofline),
        f"{m.step_ms:.2f}" if m.step_ms else "",
        f"{m.forward_ms:.2f}" if m.forward_ms else "",
        f"{m.host_ms:.2f}" if m.forward_ms else "",
        str(row.runs),
        f"{row.spread:.2f}",
    ]


def _percent(share: Share | None) -> str:
    return "" if share is None else f"{share.share:.0%} {share.bound}"


def _ratios(rows: list[Row]) -> list[str]:
    """Our best against the best peer at each workload."""
    lines = []
    for key in dict.fromkeys((row.median.workload, row.is_busy) for row in rows):
        here = [row for row in rows if (row.median.workload, row.is_busy) == key]
        ours = max((row for row in here if row.is_ours), key=lambda r: r.rate, default=None)
        peer = max((row for row in here if not row.is_ours), key=lambda r: r.rate, default=None)
        if ours is not None and peer is not None:
            point = label(key[0]) + (", busy" if key[1] else "")
            lines.append(f"{point}: {ours.rate / peer.rate:.2f} x {peer.engine}")
    return lines


def _busy_ratios(rows: list[Row]) -> list[str]:
    """What each engine keeps of its quiet rate."""
    quiet = {(r.engine, r.median.workload): r.rate for r in rows if not r.is_busy}
    return [
        f"{label(r.median.workload)}, {r.engine}: {r.rate / quiet[r.engine, r.median.workload]:.0%}"
        " of its quiet rate beside the busy processes"
        for r in rows
        if r.is_busy
    ]


def _steps(rows: list[Row]) -> list[str]:
    """The share of each engine's steps by mode, runner and reason."""
    lines = []
    for engine in dict.fromkeys(row.engine for row in rows if row.is_ours):
        counts: dict[str, int] = {}
        for row in rows:
            for key, n in row.median.steps.items() if row.engine == engine else ():
                counts[key] = counts.get(key, 0) + n
        total = sum(counts.values())
        shares = ", ".join(f"{key} {n / total:.1%}" for key, n in sorted(counts.items()))
        lines.append(f"steps of {engine}: {shares}")
    return lines


def _order(workload: Workload) -> tuple[bool, int, int]:
    return workload.new_tokens != 1, workload.prompt_tokens, workload.batch
