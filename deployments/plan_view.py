"""How plans, refusals and hardware look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..runtime.errors import ConfigurationError, PlanError
from ..runtime.planning.memory import gigabytes
from ..runtime.planning.plan import ExecutionPlan, Rejection
from ..runtime.planning.refusal import Refusal

VALUES = (
    *("device", "dtype", "kv_dtype", "linear_method", "quantization", "page_size", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_pages", "kv_bytes"),
    *("prefix_cache", "num_threads"),
)
IN_BYTES = ("kv_bytes",)


def render_plan(plan: ExecutionPlan, console: Console) -> None:
    """All of a plan: paths, values with origins, memory, what was refused and why, notes."""
    render_summary(plan, console)
    console.print(_values_table(plan))
    console.print(_memory_table(plan))
    console.print(_rejected_table(plan.rejected))


def render_summary(plan: ExecutionPlan, console: Console) -> None:
    """The few lines that `polypath serve` shows: node, paths, sizes, memory, notes and events."""
    _line(console, "model", plan.model)
    _line(console, "hardware", f"{plan.hardware} ({plan.software})")
    console.print(_paths_table(plan))
    _line(console, "sizes", _sizes_line(plan))
    _line(console, "memory", _memory_line(plan))
    _line(console, "passed over", ", ".join(_passed_over(plan)) or "nothing")
    for note in plan.notes:
        _line(console, "note", note, "yellow" if note.startswith("warning") else "")
    for event in plan.events:
        _line(console, event.stage, event.message)


def render_error(error: ConfigurationError, console: Console) -> None:
    """One clear message; for a plan that cannot be, each refusal with what would lift it."""
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    if isinstance(error, PlanError) and error.refusals:
        console.print(refusals_table(error.refusals))


def refusals_table(refusals: Sequence[Refusal]) -> Table:
    """Rule, class and what would lift it; the sentences stand in the message above."""
    table = _table("rule", "class", "what would lift it")
    for refusal in refusals:
        table.add_row(Text(refusal.rule), refusal.kind, Text(refusal.lift))
    return table


def _paths_table(plan: ExecutionPlan) -> Table:
    """One row for each distinct path."""
    table = _table("mode", "runner", "attention", "ops")
    for name in dict.fromkeys(path.name for path in plan.paths.values()):
        modes = [mode.value for mode, path in plan.paths.items() if path.name == name]
        path = next(path for path in plan.paths.values() if path.name == name)
        table.add_row(", ".join(modes), path.runner, path.attention_backend, path.ops)
    return table


def _values_table(plan: ExecutionPlan) -> Table:
    table = _table("value", "", "asked for by")
    for name in VALUES:
        value = getattr(plan, name)
        shown = gigabytes(value) if name in IN_BYTES else str(value)
        table.add_row(name, shown, plan.origins.get(name, ""))
    for name in ("runner", "attention_backend", "ops"):
        used = dict.fromkeys(getattr(path, name) for path in plan.paths.values())
        table.add_row(name, ", ".join(used), plan.origins.get(name, ""))
    return table


def _memory_table(plan: ExecutionPlan) -> Table:
    table = _table("memory", "", "")
    table.columns[1].justify = "right"
    for name in ("weights", "kv", "activation", "reserve", "total", "limit"):
        where = Text(plan.memory.limit_origin if name == "limit" else "")
        table.add_row(name, gigabytes(getattr(plan.memory, f"{name}_bytes")), where)
    return table


def _rejected_table(rejected: Sequence[Rejection]) -> Table:
    """One row for each candidate and set of reasons."""
    table = _table("refused", "modes", "why")
    reasons: dict[tuple[str, tuple[Refusal, ...]], list[str]] = {}
    for item in rejected:
        key = (f"{item.kind} {item.candidate}", item.refusals)
        reasons.setdefault(key, []).append(item.mode.value if item.mode else "all")
    for (name, refusals), modes in reasons.items():
        why = "; ".join(refusal.sentence for refusal in refusals)
        table.add_row(name, ", ".join(modes), Text(why))
    return table


def _sizes_line(plan: ExecutionPlan) -> str:
    return (
        f"{plan.dtype} on {plan.device}, {plan.linear_method} weights, up to {plan.max_num_seqs} "
        f"requests of at most {plan.max_model_len} tokens, {plan.max_num_batched_tokens} tokens a "
        f"step, {plan.num_pages} pages of {plan.page_size}"
    )


def _memory_line(plan: ExecutionPlan) -> str:
    memory = plan.memory
    names = ("weights", "kv", "activation", "reserve")
    parts = [f"{name} {gigabytes(getattr(memory, f'{name}_bytes'))}" for name in names]
    return f"{' + '.join(parts)} of {gigabytes(memory.limit_bytes)} {memory.limit_origin}"


def _passed_over(plan: ExecutionPlan) -> list[str]:
    """Kinds with the names of refused candidates, each once."""
    names: dict[str, list[str]] = {}
    for item in plan.rejected:
        kept = names.setdefault(item.kind, [])
        if item.candidate not in kept:
            kept.append(item.candidate)
    return [f"{kind} {' '.join(kept)}" for kind, kept in names.items()]


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"{label}: ", "bold"), (text, style)), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table
