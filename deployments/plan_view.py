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
    *("prefix_cache", "num_threads", "overlap_depth"),
)
IN_BYTES = ("kv_bytes",)
MEMORY = ("weights", "kv", "activation", "graph", "reserve")
SHARED_KINDS = ("device", "dtype", "linear")
"""What is chosen once for all modes."""


def render_plan(plan: ExecutionPlan, console: Console) -> None:
    """All of a plan: paths, values with origins, memory, what was refused and why, notes."""
    render_summary(plan, console)
    console.print(_values_table(plan))
    console.print(_memory_table(plan))
    for heading, rejected in _by_mode(plan):
        _line(console, heading, "" if rejected else "nothing was refused")
        if rejected:
            console.print(_rejected_table(rejected))


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
    """The estimate, and beside it what was measured once there is something to measure."""
    found = plan.measured
    table = _table("memory", "planned", *(() if found is None else ("measured",)), "")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for name in (*MEMORY, "total", "limit"):
        cells = [gigabytes(getattr(plan.memory, f"{name}_bytes"))]
        if found is not None:
            number = getattr(found, f"{name}_bytes", None)
            cells.append("" if number is None else gigabytes(number))
        said = {"limit": plan.memory.limit_origin, "activation": found and found.activation_origin}
        table.add_row(name, *cells, Text(said.get(name) or ""))
    if found is not None:
        table.add_row("peak", "", gigabytes(found.peak_bytes), Text(found.peak_origin))
    return table


def _by_mode(plan: ExecutionPlan) -> list[tuple[str, list[Rejection]]]:
    """What was refused for the whole plan, then for each mode beside its choice; modes of which
    all is the same share a heading.
    """
    shared = [item for item in plan.rejected if item.kind in SHARED_KINDS]
    whole = f"refused for all modes ({plan.dtype}, {plan.linear_method})"
    groups: dict[tuple[str, tuple[tuple[str, str, tuple[Refusal, ...]], ...]], list[str]] = {}
    rejected: dict[str, list[Rejection]] = {}
    for mode, path in plan.paths.items():
        rejected[mode] = [
            item
            for item in plan.rejected
            if item.kind not in SHARED_KINDS and item.mode in (None, mode)
        ]
        said = tuple((item.kind, item.candidate, item.refusals) for item in rejected[mode])
        groups.setdefault((path.name, said), []).append(mode)
    return [
        (whole, shared),
        *(
            (f"{', '.join(modes)}: {key[0]}, refused", rejected[modes[0]])
            for key, modes in groups.items()
        ),
    ]


def _rejected_table(rejected: Sequence[Rejection]) -> Table:
    """One row for each rule that refused a candidate."""
    table = _table("kind", "candidate", "class", "rule", "why")
    for item in rejected:
        for i, refusal in enumerate(item.refusals):
            name = ("", "") if i else (item.kind, item.candidate)
            table.add_row(*name, refusal.kind, refusal.rule, Text(refusal.sentence))
    return table


def _sizes_line(plan: ExecutionPlan) -> str:
    return (
        f"{plan.dtype} on {plan.device}, {plan.linear_method} weights, up to {plan.max_num_seqs} "
        f"requests of at most {plan.max_model_len} tokens, {plan.max_num_batched_tokens} tokens a "
        f"step, {plan.num_pages} pages of {plan.page_size}"
    )


def _memory_line(plan: ExecutionPlan) -> str:
    memory = plan.memory
    parts = [f"{name} {gigabytes(getattr(memory, f'{name}_bytes'))}" for name in MEMORY]
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
