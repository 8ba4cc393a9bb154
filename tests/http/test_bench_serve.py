"""`polypath bench serve` against servers whose pace and faults are known."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse
from typer.testing import CliRunner

from polypath.deployments.bench_serve import BenchResult, bench_server
from polypath.deployments.bench_serve_client import BenchError, Target
from polypath.deployments.bench_serve_load import Load
from polypath.deployments.bench_serve_report import Goals
from polypath.deployments.cli import app as command_line
from polypath.deployments.routes import build_api
from polypath.tests.http.fakes import FakeLink, Serve
from polypath.tests.http.keys import USER, auth_of
from polypath.tests.http.live import live_server

pytestmark = pytest.mark.anyio


async def bench(
    url: str, *loads: Load, goals: Goals | None = None, key: str | None = None, is_chat: bool = True
) -> BenchResult:
    return await bench_server(
        Target(url=url, model="", key=key, is_chat=is_chat),
        loads,
        goals=goals or Goals(),
        warm_up=1,
        on_sample=lambda *_: None,
    )


def load(concurrency: int | None = None, rate: float | None = None, requests: int = 6) -> Load:
    return Load(
        concurrency=concurrency, rate=rate, num_requests=requests, prompt_tokens=40, new_tokens=10
    )


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_paced_server_is_measured_as_it_is_paced(serve: Serve, is_chat: bool) -> None:
    link = FakeLink("abcdefghij" * 2, first_step_s=0.1, step_s=0.03)
    async with live_server(await serve(link)) as url:
        result = await bench(url, load(3), is_chat=is_chat)
    (report,) = result.reports
    assert report.errors == {}
    assert report.new_tokens == 60  # ten of each, though the text would go on
    assert {sample.prompt_tokens for sample in report.good} <= set(range(35, 46))
    assert report.prompt_tokens == sum(len(r.prompt_ids) for r in link.requests[-6:])
    assert report.first_token is not None and report.inter_token is not None
    assert report.first_token.percentiles[50] >= 100
    assert report.inter_token.percentiles[50] >= 25
    for sample in report.good:
        assert len(sample.chunk_s) == 10
        assert sample.whole_s >= 0.1 + 9 * 0.03 - 0.01
    assert report.run.wall_s >= 2 * 0.37 - 0.02  # three at once, twice


async def test_prompts_share_no_beginning(serve: Serve) -> None:
    link = FakeLink("abc")
    async with live_server(await serve(link)) as url:
        await bench(url, load(2), load(1), is_chat=False)
    prompts = [request.prompt_ids for request in link.requests]
    assert len(prompts) == 2 + 1 + 6 + 6  # to learn how it counts, to warm it up, two loads
    assert len({tuple(ids[:20]) for ids in prompts}) == len(prompts)


async def test_goodput_counts_what_meets_all_goals(serve: Serve) -> None:
    link = FakeLink("abcdefghij", first_step_s=0.1)
    async with live_server(await serve(link)) as url:
        for first_token_ms, is_good in ((50.0, False), (5000.0, True)):
            goals = Goals(first_token_ms=first_token_ms, whole_ms=10_000)
            (report,) = (await bench(url, load(2), goals=goals)).reports
            assert report.goodput is not None
            assert (report.goodput > 0) == is_good


async def test_arrivals_do_not_wait_for_answers(serve: Serve) -> None:
    link = FakeLink("abcdefghij", first_step_s=1.0)
    async with live_server(await serve(link)) as url:
        (report,) = (await bench(url, load(rate=50, requests=10))).reports
    due = [sample.due_s for sample in report.run.samples]
    assert due == sorted(due)
    assert due[-1] - due[0] < 1.0  # all were sent before the first was answered
    gaps = {round(b - a, 4) for a, b in pairwise(due)}
    assert len(gaps) > 5  # by chance, not by a clock


async def test_errors_are_counted_by_kind(serve: Serve) -> None:
    link = FakeLink("abcdefghij", first_step_s=0.2)
    gateway = await serve(link)
    async with live_server(build_api(gateway, auth_of(max_concurrent=2))) as url:
        (report,) = (await bench(url, load(6, requests=6), key=USER)).reports
        assert report.errors == {"http_429": 4}
        assert len(report.good) == 2
        link.fails_after = 3
        link.first_step_s = 0.6  # after the headers
        result = await bench_server(
            Target(url=url, model="tiny", key=USER),
            [load(1, requests=2)],
            goals=Goals(),
            warm_up=0,
            on_sample=lambda *_: None,
        )
        assert result.reports[0].errors == {"stream_error": 2}


async def test_a_wrong_key_and_a_dead_server_are_said_at_once(serve: Serve) -> None:
    async with live_server(build_api(await serve(FakeLink()), auth_of())) as url:
        with pytest.raises(BenchError, match="answered 401: Incorrect API key") as caught:
            await bench(url, load(1), key="pp-wrong")
    assert "pp-wrong" not in str(caught.value)
    with pytest.raises(BenchError, match="nothing usable answers at"):
        await bench("http://127.0.0.1:1", load(1))


def plain_server() -> FastAPI:
    """OpenAI's API at its barest: no usage, no unknown fields, text in pieces of its own."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"data": [{"id": "plain"}]})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> JSONResponse | StreamingResponse:
        if "ignore_eos" in await request.json():
            error = {"error": {"message": "Unrecognized request argument: ignore_eos"}}
            return JSONResponse(error, 400)

        async def stream() -> AsyncIterator[str]:
            yield ": a comment\n\n"
            for text in ("", "one", "two", "three"):
                chunk = {"choices": [{"delta": {"role": "assistant", "content": text}}]}
                yield f"data: {json.dumps(chunk)}\n\n"
                await asyncio.sleep(0.01)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


async def test_a_server_with_openais_own_fields_only_is_measured_too() -> None:
    async with live_server(plain_server()) as url:
        result = await bench(url, load(2))
    (report,) = result.reports
    assert result.target.ignore_eos is False
    assert (report.errors, report.new_tokens, report.prompt_tokens) == ({}, 18, None)
    assert any("chunks counted" in note for note in report.notes)
    assert any("not all answers had the 10 tokens" in note for note in report.notes)


async def test_the_command_prints_a_table_and_writes_json_and_a_plot(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", USER)
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    options = ["--requests", "4", "--prompt-tokens", "30", "--new-tokens", "5", "--ttft-ms", "9000"]
    options += ["--concurrency", "2", "--rate", "20", "--out", str(out), "--plot", str(plot)]
    options += ["--key-variable", "MY_KEY"]
    link = FakeLink("abcdefghij", step_s=0.01)
    async with live_server(build_api(await serve(link), auth_of())) as url:
        command = ["bench", "serve", f"{url}/v1", *options]
        result = await asyncio.to_thread(CliRunner().invoke, command_line, command)
    assert result.exit_code == 0, result.output
    assert "2 at once: 4 answers, 0 errors" in result.output
    assert "20 a second: 4 answers" in result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert USER not in result.output + out.read_text() + plot.read_text()
    found = json.loads(out.read_text())
    assert [entry["new_tokens"] for entry in found["loads"]] == [20, 20]
    assert all(entry["goodput_per_s"] > 0 for entry in found["loads"])
    root = ElementTree.fromstring(plot.read_text())
    curves = [path for path in root.iter() if path.get("stroke-width") == "2"]
    assert len(curves) == 6  # three panels, two loads


async def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path: Path) -> None:
    command = ["bench", "serve", "http://127.0.0.1:1", "--plot", str(tmp_path / "no" / "x.svg")]
    result = await asyncio.to_thread(CliRunner().invoke, command_line, command)
    assert result.exit_code == 1
    assert "is no folder" in str(result.exception)
