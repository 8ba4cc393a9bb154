"""docs/paths.md names what exists: every reason, every runner, the metric; its tables are fresh."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.planner import plan
from polypath.runtime.planning.tables import OTHER_RULES, TABLES, with_tables
from polypath.runtime.runners import registry
from polypath.runtime.runners.runner import Reason
from polypath.tests.unit.planning.asking import wishes
from polypath.tests.unit.planning.public_models import public_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "paths.md").read_text(encoding="utf-8")


def test_the_page_names_every_reason_and_runner() -> None:
    for name in [*Reason, *(candidate.name for candidate in registry.CANDIDATES)]:
        assert f"`{name}`" in PAGE, name


def test_the_metric_that_the_page_names_exists() -> None:
    sources = (path.read_text() for path in (ROOT / "deployments").glob("*.py"))
    assert any("polypath_worker_steps" in source for source in sources)


def test_the_tables_are_what_the_records_say() -> None:
    assert with_tables(PAGE) == PAGE, (
        "docs/paths.md is stale: run python -m polypath.runtime.planning.tables docs/paths.md"
    )


@pytest.mark.parametrize("name", TABLES)
def test_each_table_stands_on_the_page_once(name: str) -> None:
    assert len(re.findall(rf"<!-- table {name}[: ]", PAGE)) == 1


def test_a_stale_table_is_found() -> None:
    stale = PAGE.replace("| `cuda_graph` |", "| `other_graph` |")
    assert with_tables(stale) != stale


def test_every_rule_that_the_code_names_is_on_the_page() -> None:
    sources = [path.read_text() for path in (ROOT / "runtime" / "planning").glob("*.py")]
    named = {
        name
        for source in sources
        for name in re.findall(r'(?:rule=|_error\(\s*)"([\w.]+)"', source)
    }
    assert {"rank", "memory", "sizes.batch", "num_threads"} <= named
    for name in named:
        assert f"`{name}`" in PAGE, name
    assert len(OTHER_RULES) == 3


# The plan as JSON. What stands here is a promise to scripts: add to it, take nothing away.

PLAN_KEYS = (
    *("schema", "fingerprint", "hardware", "software", "model", "device", "device_name", "dtype"),
    *("kv_dtype", "page_size", "linear_method", "quantization", "paths", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_pages", "kv_bytes"),
    *("prefix_cache", "memory", "num_threads", "native_kernels", "capture_sizes", "environment"),
    *("rejected", "origins", "notes", "events", "measured"),
)
INNER_KEYS = {
    "memory": (
        *("weights_bytes", "kv_bytes", "activation_bytes", "graph_bytes", "reserve_bytes"),
        *("total_bytes", "limit_bytes", "limit_origin"),
    ),
    "rejected": ("mode", "kind", "candidate", "refusals"),
    "refusals": ("rule", "kind", "sentence", "lift"),
    "paths": ("mode", "runner", "attention_backend", "ops"),
}


def test_no_key_of_the_plans_json_disappears_and_each_is_explained() -> None:
    found = plan(load_hardware("h200"), public_model("Qwen3-0.6B"), wishes()).to_json()
    section = PAGE.partition("## The plan as JSON")[2]
    assert set(PLAN_KEYS) <= set(found)
    assert set(INNER_KEYS["memory"]) <= set(found["memory"])
    assert set(INNER_KEYS["rejected"]) <= set(found["rejected"][0])
    assert set(INNER_KEYS["refusals"]) <= set(found["rejected"][0]["refusals"][0])
    assert set(INNER_KEYS["paths"]) <= set(found["paths"]["decode"])
    for name in [*found, *(name for names in INNER_KEYS.values() for name in names)]:
        assert f"`{name}`" in section, name
