"""How `polypath bench engine` shows its figures."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ..runtime.bench import Ceilings, Measurement, Workload, median
from ..runtime.planning.plan import ExecutionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine at one workload: the medians, and how far single runs lie apart (largest over
    smallest rate).
    """

    engine: str
    runs: int
    spread: float
    median: Measurement

    @classmethod
    def of(cls, engine: str, runs: list[Measurement]) -> Row:
        """Sum up the runs."""
        rates = [run.decode_tokens_s or run.prefill_tokens_s for run in runs]
        return cls(
            engine=engine, runs=len(runs), spread=max(rates) / min(rates), median=median(runs)
        )


def render_bench(plan: ExecutionPlan, top: Ceilings, rows: list[Row]) -> None:
    """Print one line a row, and what it ran on."""
    table = Table(title="medians; tokens/s over the whole batch")
    for name in ("workload", "engine", "prefill", "decode", "step ms", "host ms", "runs", "spread"):
        table.add_column(name, justify="left" if name in ("workload", "engine") else "right")
    for row in sorted(rows, key=lambda r: _order(r.median.workload)):
        m = row.median
        table.add_row(
            _label(m.workload),
            row.engine,
            f"{m.prefill_tokens_s:.1f}",
            f"{m.decode_tokens_s:.1f}" if m.decode_tokens_s else "",
            f"{m.step_ms:.2f}" if m.step_ms else "",
            f"{m.host_ms:.2f}" if m.step_ms else "",
            str(row.runs),
            f"{row.spread:.2f}",
        )
    console = Console(width=max(100, Console().width))
    console.print(table)
    console.print(
        f"{plan.device_name}; {top.threads} threads; read {top.read_gb_s:.1f} GB/s, "
        f"fp32 {top.fp32_gflop_s:.0f} GFLOP/s; plan {plan.fingerprint()}",
        highlight=False,
    )


def _label(workload: Workload) -> str:
    w = workload
    if w.new_tokens == 1:
        return f"prefill {w.prompt_tokens}" + (f" x {w.batch}" if w.batch > 1 else "")
    return f"batch {w.batch}, {w.prompt_tokens} + {w.new_tokens}"


def _order(workload: Workload) -> tuple[bool, int, int]:
    return workload.new_tokens != 1, workload.batch, workload.prompt_tokens
