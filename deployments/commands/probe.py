"""`polypath probe`: the facts about this node that plans are made from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ...runtime.planning.hardware import Hardware


def probe(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON that `polypath plan --hardware` reads.")
    ] = False,
    ray_labels: Annotated[
        bool,
        typer.Option(
            "--ray-labels",
            help="Print labels for `ray start --labels`: device, isa, cores, memory, card.",
        ),
    ] = False,
) -> None:
    """Look at this node.

    Processor, memory, cards, driver, torch, packages and compiler.
    """
    from rich.console import Console

    from ...runtime.planning.probe import probe as look

    if as_json and ray_labels:
        raise typer.BadParameter("--json and --ray-labels are two outputs; give one")
    hardware = look()
    if ray_labels:
        from ..node_labels import as_option, node_labels

        typer.echo(as_option(node_labels(hardware)))
        return
    if as_json:
        typer.echo(json.dumps(hardware.to_json(), indent=2))
        return
    console = Console()
    console.print(facts_table(hardware))
    console.print(packages_table(hardware))
    for note in hardware.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def facts_table(hardware: Hardware) -> Table:
    """One row a fact; what is unknown or broken says so."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, fact in _facts(hardware):
        table.add_row(Text(name, "bold"), Text(fact))
    return table


def _facts(hardware: Hardware) -> list[tuple[str, str]]:
    from ...runtime.planning.memory import gigabytes

    cpu, memory = hardware.cpu, hardware.memory
    total, free = gigabytes(memory.total_bytes), gigabytes(memory.free_bytes)
    return [
        ("node", hardware.name),
        ("software", hardware.software),
        ("processor", f"{cpu.name} ({cpu.architecture})"),
        ("cores", f"{cpu.cores_usable} of {cpu.cores_total}: {cpu.cores_origin}"),
        ("instructions", " ".join(cpu.isa) or "unknown"),
        ("memory", f"{total}, free {free}: {memory.origin}"),
        ("NUMA", _numa(hardware)),
        *_cards(hardware),
        ("torch", _torch(hardware)),
        ("compiler", _compiler(hardware)),
    ]


def _numa(hardware: Hardware) -> str:
    from ...runtime.planning.memory import gigabytes

    if hardware.numa is None:
        return "unknown"
    return "; ".join(
        f"node {node.id}: {len(node.cpus)} CPUs, {gigabytes(node.memory_bytes)}"
        for node in hardware.numa
    )


def _cards(hardware: Hardware) -> list[tuple[str, str]]:
    from ...runtime.planning.memory import gigabytes

    driver = hardware.driver
    if driver.version is None:
        rows = [("driver", f"none: {driver.problem}")]
    else:
        cuda = ".".join(map(str, driver.cuda_version)) if driver.cuda_version else "unknown"
        rows = [("driver", f"{driver.version}, CUDA up to {cuda}")]
        rows += [("", f"problem: {driver.problem}")] if driver.problem else []
    for gpu in hardware.gpus:
        level = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
        memory = f"{gigabytes(gpu.total_bytes)}, free {gigabytes(gpu.free_bytes)}"
        problem = f"; cannot be used: {gpu.problem}" if gpu.problem else ""
        rows.append((f"card {gpu.index}", f"{gpu.name}, {memory}, compute {level}{problem}"))
    return rows


def _torch(hardware: Hardware) -> str:
    torch = hardware.torch
    if torch.version is None:
        return torch.problem or "not installed"
    build = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
    return f"{torch.version} ({build})" + (f"; {torch.problem}" if torch.problem else "")


def _compiler(hardware: Hardware) -> str:
    compiler = hardware.compiler
    if compiler.problem is not None:
        return f"cannot be used: {compiler.problem}"
    headers = "with" if compiler.python_headers else "without"
    return f"{compiler.path}, {compiler.version}, {headers} Python's headers"


def packages_table(hardware: Hardware) -> Table:
    """Optional packages: version, and whether they import."""
    from rich.table import Table
    from rich.text import Text

    table = Table("package", "version", "imports", box=None, header_style="bold", pad_edge=False)
    words = {True: "yes", False: "no", None: "not tried"}
    for name, package in hardware.packages.items():
        if package.version is None:
            table.add_row(name, "not installed", "")
            continue
        imports = words[package.imports] + (f": {package.problem}" if package.problem else "")
        table.add_row(name, Text(package.version), Text(imports))
    return table
