"""`polypath probe` and `polypath plan` as people and scripts call them."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from polypath.deployments.commands.engine_options import engine_options, parse_bytes
from polypath.deployments.commands.plan import plan
from polypath.deployments.commands.probe import probe
from polypath.deployments.plan_view import render_plan, render_summary
from polypath.runtime.config import EngineConfig
from polypath.runtime.planning.hardware import Hardware, load_hardware
from polypath.runtime.planning.plan import ExecutionPlan, MeasuredMemory
from polypath.runtime.planning.planner import plan as make_plan

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}


@pytest.fixture
def config_only(tmp_path: Path) -> str:
    """A folder with nothing but a config: a dry run needs no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def call(*arguments: str) -> Any:  # Any: typer's Result, which it does not export
    app = typer.Typer()
    app.command()(plan)
    app.command()(probe)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_probe_prints_json_that_plan_reads(config_only, tmp_path) -> None:
    printed = call("probe", "--json")
    assert printed.exit_code == 0
    Hardware.from_json(json.loads(printed.stdout))
    node = tmp_path / "node.json"
    node.write_text(printed.stdout)
    planned = call("plan", config_only, "--hardware", str(node), "--json")
    assert planned.exit_code == 0
    found = ExecutionPlan.from_json(json.loads(planned.stdout))
    assert found.hardware == json.loads(printed.stdout)["name"]


def test_probe_shows_facts_and_packages() -> None:
    text = call("probe").stdout
    assert "processor" in text and "memory" in text and "flashinfer" in text


def test_plan_shows_paths_origins_memory_and_refusals(config_only) -> None:
    shown = call("plan", config_only, "--hardware", "t4", "--max-num-seqs", "4")
    assert shown.exit_code == 0
    for part in ("torch_sdpa", "user", "weights", "is on no list for sm_75", "assumes Linux"):
        assert part in shown.stdout


def test_an_impossible_choice_exits_with_2_and_its_reasons(config_only) -> None:
    shown = call("plan", config_only, "--hardware", "avx2", "--attention-backend", "flashinfer")
    assert shown.exit_code == 2 and shown.stdout == ""
    assert "flashinfer is not installed" in shown.stderr
    assert "--attention-backend cpu_native" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runner", "nonsense"), "cuda_graph"),
        (("--hardware", "nonsense"), "profiles are this, a100-40"),
        (("--page-size", "15"), "power of two"),
        (("--kv-bytes", "lots"), "1GiB"),
        (("--memory-share", "1.5"), "memory_share"),
        (("--max-model-len", "513"), "512"),
    ],
)
def test_a_wrong_option_is_one_clear_message(config_only, arguments, message) -> None:
    shown = call("plan", config_only, *arguments)
    assert shown.exit_code == 2 and message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_missing_model_is_one_clear_message() -> None:
    shown = call("plan", "/nonexistent/model", "--hardware", "avx2")
    assert shown.exit_code == 2 and "/nonexistent/model" in shown.stderr


def test_every_option_reaches_the_config() -> None:
    seen: list[EngineConfig] = []

    @engine_options
    def command(config: EngineConfig) -> None:
        seen.append(config)

    app = typer.Typer()
    app.command()(command)
    words = {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "runner": "eager",
        "attention_backend": "torch_sdpa",
        "ops": "torch",
        "linear_method": "dense",
        "quantization": "int8",
        "page_size": 32,
        "kv_bytes": 1 << 20,
        "memory_share": 0.25,
        "max_model_len": 11,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 13,
        "max_waiting": 14,
        "served_model_name": "name",
        "chat_template": "{{ x }}",
    }
    options = [w for k, v in words.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    done = CliRunner().invoke(app, ["m", *options, "--no-prefix-cache", "--no-self-check"])
    assert done.exit_code == 0, done.output
    assert seen == [EngineConfig(model="m", prefix_cache=False, self_check=False, **words)]  # pyright: ignore[reportArgumentType]
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen[1] == EngineConfig(model="")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("1500", 1500), ("512MB", 512 * 10**6), ("1GiB", 1 << 30), ("1.5 gib", 3 << 29)),
        *(("2K", 2000), ("4kib", 4096), ("0B", 0)),
    ],
)
def test_sizes_have_units(text, num_bytes) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "1TB1", "-1", "1e9", "1 Gigabyte"])
def test_other_sizes_are_refused(text) -> None:
    with pytest.raises(typer.BadParameter, match="512MB"):
        parse_bytes(text)


def test_the_summary_is_short_and_a_name_is_not_markup(model) -> None:
    node = load_hardware("t4")
    found = make_plan(node, model, EngineConfig(model="m")).with_event("self_check", "[red]ok")
    short, long = io.StringIO(), io.StringIO()
    render_summary(found, Console(file=short, width=100))
    render_plan(found, Console(file=long, width=100))
    assert len(short.getvalue().splitlines()) <= 14
    assert "[red]ok" in short.getvalue()
    assert short.getvalue() in long.getvalue()


def test_each_mode_is_shown_with_its_choice_and_every_refusal(model) -> None:
    found = make_plan(load_hardware("h200"), model, EngineConfig(model="m"))
    page = io.StringIO()
    render_plan(found, Console(file=page, width=400))
    text = page.getvalue()
    for mode, path in found.paths.items():
        assert re.search(rf"^[a-z, ]*{mode}[a-z, ]*: {re.escape(path.name)}, refused", text, re.M)
    for item in found.rejected:
        for refusal in item.refusals:
            assert refusal.sentence in text and refusal.rule in text


def test_measured_memory_stands_beside_the_estimate(model) -> None:
    found = make_plan(load_hardware("h200"), model, EngineConfig(model="m"))
    measured = MeasuredMemory(
        weights_bytes=1 << 20, kv_bytes=2 << 20, graph_bytes=3 << 20, peak_bytes=77 << 20,
        peak_origin="of the card", activation_bytes=55 << 20, activation_origin="a largest step",
    )  # fmt: skip
    page = io.StringIO()
    render_plan(replace(found, measured=measured), Console(file=page, width=200))
    assert "measured" in page.getvalue() and "77 MiB" in page.getvalue()
    assert re.search(r"activation +[0-9.]+ [GM]iB +55 MiB +a largest step", page.getvalue())
