"""The table of `polypath paths`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polypath.deployments.commands.paths import paths_table

WORKER: dict[str, Any] = {
    "worker_id": "worker-1",
    "model": "smol",
    "path": {"decode": "eager+torch_sdpa+torch", "prefill": "eager+torch_sdpa+torch"},
    "steps": [
        {"mode": "decode", "runner": "eager", "reason": "planned", "count": 120},
        {"mode": "decode", "runner": "eager", "reason": "too_large", "count": 3},
    ],
    "stats": {"running": 2, "waiting": 5, "kv_pages_used": 7, "kv_pages_total": 100},
}


def text_of(workers: list[dict[str, Any]]) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(paths_table(workers))
    return capture.get()


def test_each_mode_has_a_row_with_its_path_and_steps() -> None:
    text = text_of([WORKER])
    assert "worker-1" in text
    assert "eager 120 planned, 3 too_large" in text
    assert "7/100" in text
    assert text.count("eager+torch_sdpa+torch") == 2


def test_a_silent_worker_is_shown_as_such() -> None:
    assert "no answer" in text_of([WORKER | {"stats": None, "steps": []}])
