"""The table of `polypath paths`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from polypath.deployments.commands.paths import headline, memory_line, paths_table

WORKER: dict[str, Any] = {
    "worker_id": "worker-1",
    "model": "smol",
    "pool": "t4",
    "node": {"id": "a1", "address": "10.0.0.7", "labels": {"zone": "b"}},
    "fingerprint": "pp-0123456789ab",
    "path": {"decode": "eager+torch_sdpa+torch", "prefill": "eager+torch_sdpa+torch"},
    "steps": [
        {"mode": "decode", "runner": "eager", "reason": "planned", "count": 120},
        {"mode": "decode", "runner": "eager", "reason": "too_large", "count": 3},
    ],
    "stats": {"running": 2, "waiting": 5, "kv_pages_used": 7, "kv_pages_total": 100},
}


def test_each_mode_has_a_row_with_its_path_and_steps_on_a_narrow_terminal() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(paths_table(WORKER))
    text = capture.get()
    assert "eager 120 planned, 3 too_large" in text
    assert text.count("eager+torch_sdpa+torch") == 2
    assert "97%" in text, "120 of 123 steps ran as planned"


def test_the_headline_says_how_busy_the_worker_is() -> None:
    text = headline(WORKER)
    assert text.startswith("worker-1  smol  pool t4, 10.0.0.7  pp-0123456789ab")
    assert "2 running, 5 waiting, 7 of 100 KV pages" in text


def test_a_silent_worker_is_shown_as_such() -> None:
    assert headline(WORKER | {"stats": None}).endswith("does not answer")


def test_memory_is_shown_as_measured_and_as_planned() -> None:
    names = ("weights_bytes", "kv_bytes", "graph_bytes")
    measured = dict.fromkeys(names, 2 << 20) | {"peak_bytes": 9 << 20, "peak_origin": "resident"}
    planned = dict.fromkeys((*names, "activation_bytes"), 3 << 20)
    plan = {"memory": planned, "measured": measured}
    text = memory_line(WORKER | {"plan": plan})
    assert text.startswith("memory: weights 2 MiB of 3 MiB planned, kv 2 MiB of 3 MiB planned")
    assert "activation not measured of 3 MiB planned (by an older version)" in text
    assert text.endswith("peak 9 MiB resident")
    measured |= {"activation_bytes": 1 << 20, "activation_origin": "a largest step"}
    text = memory_line(WORKER | {"plan": plan})
    assert "activation 1 MiB of 3 MiB planned (a largest step)" in text


def test_a_worker_of_an_older_version_was_not_measured() -> None:
    assert memory_line(WORKER | {"plan": {"memory": {}}}) == "memory: not measured"
    assert memory_line(WORKER | {"plan": None}) == "memory: not measured"
