"""What a start looks like where no terminal is: one line a stage, each once."""

from __future__ import annotations

import pytest

from polypath.deployments.pool_start import PoolStart
from polypath.deployments.serve_view import ServeView
from polypath.deployments.startup import StartupRecord


def event(stage: str, seconds: float | None, fraction: float = 1.0) -> dict[str, object]:
    return {"stage": stage, "message": f"{stage} done", "fraction": fraction, "seconds": seconds}


def pool(*workers: list[dict[str, object]], name: str = "the worker") -> PoolStart:
    records = [StartupRecord(pid=n, events=events) for n, events in enumerate(workers)]
    return PoolStart(title=name, num_workers=len(workers), records=records)


def test_each_finished_stage_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = ServeView()
    view.stage("ray", "a Ray of its own")
    view.stage("worker", "")
    probe, half = event("probe", 0.1), event("weights", None, 0.5)
    view.progress([pool([probe, half])])
    view.progress([pool([probe, event("weights", 2.0), event("kv_pool", 0.25)])])
    view.progress([pool([probe, event("weights", 2.0), event("kv_pool", 0.25)])])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["Ray", "worker", "weights", "KV"]
    assert lines[2] == "  weights     weights done  [2.0 s]"


def test_several_workers_have_a_line_each_once_they_are_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = ServeView()
    done = [event("plan", 0.1), event("weights", 1.0), event("ready", 3.0)]
    for look in (pool(done, [event("plan", 0.1)], name="pool a"), pool(done, done, name="pool a")):
        view.progress([look, pool([], name="pool b")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"  pool a, process {n}: plan done  [3.0 s]" for n in (0, 1)]


def test_the_end_of_a_start_says_where_how_and_how_to_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ServeView().ready("http://[::1]:80", ["smol"], "something listens on [::1]")
    text = capsys.readouterr().out
    assert "http://[::1]:80/v1" in text
    assert "curl http://[::1]:80/v1/chat/completions" in text
    assert '"model": "smol"' in text
    assert "Note: something listens on [::1]" in text
    assert "Ctrl-C stops it." in text
    assert "Authorization" not in text
    ServeView().ready("http://h:80", ["smol"], None, needs_key=True)
    assert '-H "Authorization: Bearer $POLYPATH_API_KEY"' in capsys.readouterr().out


def test_an_error_is_one_sentence_on_stderr_with_the_logs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ServeView().error("[bold]the worker[/bold] failed")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: [bold]the worker[/bold] failed\n"
