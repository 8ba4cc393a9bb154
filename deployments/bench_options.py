"""Choices of path that `polypath bench engine` takes several times, to compare them in one run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import product
from typing import Annotated, Any

import typer

REPEATABLE = ("runner", "attention_backend", "ops", "linear_method")


def repeatable_paths(command: Callable[..., None]) -> Callable[..., None]:
    """A command of `engine_options` with a parameter `variants`: it gets every combination of the
    choices that were given, as dicts of EngineConfig's fields.
    """
    parameters = [
        _repeatable(p) if p.name in REPEATABLE else p
        for p in inspect.signature(command).parameters.values()
        if p.name != "variants"
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:  # Any: what typer parsed
        given = {name: values.pop(name) or ["auto"] for name in REPEATABLE}
        variants = [
            dict(zip(given, choice, strict=True))
            for choice in product(*map(_unique, given.values()))
        ]
        command(**values, **variants[0], variants=variants)

    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def variant_name(variant: dict[str, str], variants: list[dict[str, str]]) -> str:
    """ "polypath", with what sets this variant apart from the others."""
    apart = [v for name, v in variant.items() if any(v != other[name] for other in variants)]
    return " ".join(["polypath", *apart])


def _repeatable(parameter: inspect.Parameter) -> inspect.Parameter:
    (option,) = parameter.annotation.__metadata__
    annotation = Annotated[list[str] | None, typer.Option(help=f"{option.help} Repeatable.")]
    return parameter.replace(annotation=annotation, default=None)


def _unique(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))
