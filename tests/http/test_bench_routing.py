"""`polypath bench routing` over HTTP: all policies get the same load, and only where allowed."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

from polypath.deployments.api_settings import ApiSettings
from polypath.deployments.bench_routing import Fleet, bench_routing
from polypath.deployments.bench_serve_client import BenchError, Target
from polypath.deployments.bench_serve_load import Load
from polypath.deployments.bench_serve_report import Goals
from polypath.deployments.cli import app
from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import Checkpoint
from polypath.tests.http.live import live_server
from polypath.tests.paced import PacedLink

pytestmark = pytest.mark.anyio

FAST, SLOW = 0.01, 0.04
LOAD = Load(rate=9.0, num_requests=8, prompt_tokens=8, new_tokens=10)


async def unequal(tiny: Checkpoint, **settings: Any) -> tuple[Gateway, list[PacedLink]]:
    """Two workers at 4:1, two requests at once each: 250 tokens/s together."""
    gateway = Gateway(ApiSettings(**settings))
    gateway.add_checkpoint(tiny, name="tiny")
    links = [
        PacedLink("fast", FAST, max_num_seqs=2, max_waiting=500),
        PacedLink("slow", SLOW, max_num_seqs=2, max_waiting=500),
    ]
    for link in links:
        await gateway.add_worker(link)
    return gateway, links


async def test_all_policies_get_the_same_load(tiny: Checkpoint) -> None:
    gateway, links = await unequal(tiny, compares_policies=True)
    async with live_server(gateway) as url:
        target = Target(url=url, model="tiny", is_chat=False)
        result = await bench_routing(target, LOAD, goals=Goals(whole_ms=600.0), rounds=2)
    assert list(result.reports) == ["fastest", "fastest + goal", "power_of_two"]
    for report in result.reports.values():
        assert len(report.good) == 2 * LOAD.num_requests
        assert report.new_tokens == 2 * LOAD.num_requests * LOAD.new_tokens
    ours, _, theirs = (report.run.samples for report in result.reports.values())
    gaps = [[b.due_s - a.due_s for a, b in pairwise(run[:8])] for run in (ours, theirs)]
    assert gaps[0] == pytest.approx(gaps[1], abs=0.001), "the same arrivals"
    prompts = [request.prompt_ids for link in links for request in link.requests]
    assert len(set(prompts)) == len(prompts), "no prompt twice, or a cache would answer"
    reasons = gateway.metrics.render([]).decode()
    assert 'reason="power_of_two"} 16.0' in reasons
    assert result.ratio() > 0 and (result.goodput_ratio() or 0) > 0
    gateway.close()


async def test_a_server_that_does_not_allow_it_is_told(tiny: Checkpoint) -> None:
    gateway, _ = await unequal(tiny)
    async with live_server(gateway) as url:
        target = Target(url=url, model="tiny", is_chat=False)
        with pytest.raises(BenchError, match=r"api\.compares_policies"):
            await bench_routing(target, LOAD, goals=Goals(), rounds=1)
    gateway.close()


async def test_the_command_fits_load_and_goal_to_what_the_workers_measured(
    tiny: Checkpoint,
) -> None:
    gateway, _ = await unequal(tiny, compares_policies=True)
    async with live_server(gateway) as url:
        arguments = ["bench", "routing", url, "--requests", "4", "--rounds", "1"]
        arguments += ["--new-tokens", "10", "--prompt-tokens", "8"]
        run = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert run.exit_code == 0, run.output
        assert "2 workers, 17.50 requests/s" in run.output
        assert "within 200 ms" in run.output
        assert "power_of_two" in run.output and "times the good answers" in run.output
        run = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
        found = json.loads(run.output)
        assert set(found) == {"fastest", "fastest + goal", "power_of_two"}
    gateway.close()


def test_without_measured_speeds_a_rate_must_be_given() -> None:
    with pytest.raises(BenchError, match="--rate"):
        Fleet.of([{"worker_id": "a", "calibration": None}])
