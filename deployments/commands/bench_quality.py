"""`polypath bench quality`: what the planned path's rounding costs, against float32."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.config import EngineConfig
from ...runtime.errors import ConfigurationError
from .engine_options import engine_options

if TYPE_CHECKING:
    from ...runtime.quality import Quality

TEXT = Path(__file__).resolve().parents[2] / "benchmarks/data/alice.txt"
MAX_RATIO, MIN_HELD = 1.01, 0.9


@engine_options
def quality(
    config: EngineConfig,
    text: Annotated[
        Path | None, typer.Option(help="A text file; benchmarks/data/alice.txt if not given.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens scored together.")] = 512,
    prompts: Annotated[int, typer.Option(help="Pieces of the text that are continued.")] = 20,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Perplexity and greedy continuations against float32 on the same weights. Exit code 1 where
    the perplexity is more than 1% higher, or fewer than 90% of continuations are equal or part at
    a near-tie.
    """
    from ...runtime.quality import compare
    from ...runtime.startup import YARDSTICK
    from ..engine_here import build_engine

    if min(window, new_tokens) < 2 or prompts < 1:
        raise typer.BadParameter("--window and --new-tokens must be at least 2, --prompts 1")
    content = _read(text or TEXT)
    engine = build_engine(replace(config, calibration=False))
    plain = {**YARDSTICK, "dtype": "float32", "kv_dtype": "float32", "calibration": False}
    reference = build_engine(replace(config, **plain))
    ids = engine.tokenizer.encode(content)
    if len(ids) < window:
        raise ConfigurationError(f"the text has {len(ids)} tokens; --window {window} needs more")
    found = compare(
        engine, reference, ids, window=window, num_prompts=prompts, new_tokens=new_tokens
    )
    if as_json:
        facts = {"ratio": found.ratio, "share_held": found.share_held}
        plans = [each.plan.to_json() for each in (engine, reference)]
        typer.echo(json.dumps({**asdict(found), **facts, "plans": plans}, indent=1))
    else:
        _show(found)
    if found.ratio > MAX_RATIO or found.share_held < MIN_HELD:
        raise typer.Exit(1)


def _show(found: Quality) -> None:
    typer.echo(
        f"perplexity {found.perplexity:.3f}, float32 {found.reference_perplexity:.3f}, ratio "
        f"{found.ratio:.4f} over {found.num_scored} tokens (at most {MAX_RATIO})"
    )
    for i, each in enumerate(found.continuations):
        if each.differs_at is not None:
            near = "a near-tie" if each.holds else "no near-tie"
            gap = "beyond the likeliest" if each.gap is None else f"{each.gap:.3f}"
            typer.echo(f"piece {i}: parts at token {each.differs_at}, gap {gap}, {near}")
    typer.echo(
        f"{found.share_held:.0%} of {len(found.continuations)} continuations are equal or part at "
        f"a near-tie (at least {MIN_HELD:.0%})"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as text ({error}); the default text comes with the sources, "
            "give another with --text"
        ) from None
