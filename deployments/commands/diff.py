"""`polypath diff`: where two execution paths part."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ...runtime.diff import PathDiff, Row

PATH_HELP = "RUNNER+ATTENTION+OPS as `polypath plan` prints it; +LINEAR_METHOD, +DTYPE, +DEVICE."


def diff(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder, .gguf file or hub id; SmolLM2-135M-Instruct if not given.",
            show_default=False,
        ),
    ] = "",
    *,
    a: Annotated[str, typer.Option("--a", help=PATH_HELP)],
    b: Annotated[str, typer.Option("--b", help=PATH_HELP)],
    prompt: Annotated[str | None, typer.Option(help="A text; else random tokens.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="How many random tokens.")] = 16,
    decodes: Annotated[int, typer.Option(min=0, help="Decode steps after the prompt.")] = 4,
    max_rows: Annotated[int, typer.Option(min=1, help="Operations shown in the table.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the first layer and operation where two execution paths part.

    The table starts before that place, or shows the largest differences where there is none. "own"
    is the difference when each path goes on from its own values, "same" when b starts each
    operation from a's. Exit code 1 when the logits, or an operation from the same values, are
    beyond their bound.
    """
    from rich.console import Console

    from ...runtime.config import EngineConfig
    from ...runtime.diff import diff as compare
    from ...runtime.errors import ConfigurationError
    from ..plan_view import render_error

    try:
        found = compare(
            EngineConfig(model=model),
            a,
            b,
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            decodes=decodes,
        )
    except ConfigurationError as error:
        render_error(error, Console(stderr=True))
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=1))
    else:
        console = Console()
        for name, path, i in (("a", found.a, 0), ("b", found.b, 1)):
            paths = ", ".join(dict.fromkeys(path.values()))
            print(f"{name}: {paths}, weights {found.linear_methods[i]}, {found.dtypes[i]}")
        console.print(_table(shown(found, max_rows)))
        print(
            f"{found.tokens} tokens in {found.steps} steps; the likeliest token is the same in "
            f"{found.same_choices} of {found.choices} places"
        )
        print(found.verdict())
    if found.parted is not None:
        raise typer.Exit(1)


def to_json(found: PathDiff) -> dict[str, object]:
    """Everything, and the first operation beyond its bound."""
    parted = found.parted
    place = None if parted is None else {"layer": parted.layer, "operation": parted.operation}
    rows = [{**asdict(row), "within": not row.parts} for row in found.rows]
    return {**asdict(found), "rows": rows, "parted": place, "verdict": found.verdict()}


def shown(found: PathDiff, max_rows: int) -> list[Row]:
    """The rows around the parting, or those of the largest differences, in order."""
    rows = list(found.rows)
    if found.parted is not None:
        first = max(0, rows.index(found.parted) - max_rows // 2)
        return rows[first : first + max_rows]
    largest = sorted(rows, key=lambda row: row.own.relative, reverse=True)[:max_rows]
    return [row for row in rows if row in largest]


def _table(rows: list[Row]) -> Table:
    from rich import box
    from rich.table import Table

    columns = ("layer", "operation", "largest", "own", "bound", "same", "bound", "verdict")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        layer = "" if row.layer is None else str(row.layer)
        figures = (row.own.largest, row.own.relative, row.bound, row.same.relative, row.same_bound)
        verdict = "within" if not row.parts else "beyond" if row.is_faultless else "AT FAULT"
        table.add_row(layer, row.operation, *(f"{figure:.1e}" for figure in figures), verdict)
    return table
