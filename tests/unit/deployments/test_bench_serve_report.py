"""The figures of `polypath bench serve`, from samples made by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from polypath.deployments.bench_serve_client import Sample
from polypath.deployments.bench_serve_load import Load, LoadRun
from polypath.deployments.bench_serve_plot import nice_ticks, plot
from polypath.deployments.bench_serve_prompts import Prompts
from polypath.deployments.bench_serve_report import Goals, LoadReport, percentile


def sample(first_s: float, gaps_s: list[float], **fields: object) -> Sample:
    times = [10.0 + first_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    return Sample(due_s=10.0, chunk_s=times, end_s=times[-1], **fields)  # pyright: ignore[reportArgumentType]


def report(*samples: Sample, goals: Goals | None = None) -> LoadReport:
    load = Load(concurrency=1, num_requests=len(samples), new_tokens=3)
    run = LoadRun(load=load, samples=samples, wall_s=2.0, cpu_share=0.1)
    return LoadReport(run=run, goals=goals or Goals())


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (95, 95), (99, 99), (100, 100), (1, 1)])
def test_percentiles_are_values_that_were_measured(percent: int, value: int) -> None:
    assert percentile(list(range(1, 101)), percent) == value
    assert percentile([7.0], percent) == 7.0


def test_a_load_in_figures() -> None:
    found = report(
        sample(0.1, [0.02, 0.04], prompt_tokens=5, new_tokens=3),
        sample(0.3, [0.02, 0.02], prompt_tokens=7, new_tokens=3),
        Sample(due_s=10.0, end_s=11.0, error="http_429"),
        goals=Goals(first_token_ms=200, per_token_ms=31),
    )
    assert found.errors == {"http_429": 1}
    assert (found.prompt_tokens, found.new_tokens) == (12, 6)
    assert found.goodput == 0.5  # one of two within 2 s
    written = found.to_json()
    assert written["new_tokens_per_s"] == 3.0
    assert written["first_token_ms"]["p50"] == pytest.approx(100)
    assert written["whole_ms"]["p99"] == pytest.approx(340)
    assert written["inter_token_ms"]["p50"] == pytest.approx(20)
    assert written["per_token_ms"]["p99"] == pytest.approx(30)
    assert written["notes"] == []


def test_several_tokens_in_a_chunk_count_by_usage() -> None:
    found = report(sample(0.1, [0.09], new_tokens=10, prompt_tokens=1))
    assert found.good[0].per_token_s == pytest.approx(0.01)


def test_nothing_but_errors_has_no_percentiles() -> None:
    found = report(Sample(due_s=10.0, end_s=11.0, error="timeout"))
    written = found.to_json()
    assert written["first_token_ms"] is None
    assert (written["answers_per_s"], written["goodput_per_s"]) == (0, None)
    assert "<svg" in plot("all failed", [found])


@pytest.mark.parametrize("most", [0.4, 1, 7, 33, 100, 101, 2500, 99999])
def test_an_axis_has_a_few_round_ticks_and_ends_beyond_the_values(most: float) -> None:
    ticks = nice_ticks(most)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert most <= ticks[-1] < most * 1.7


def test_a_plot_is_well_formed_and_shows_names_as_text() -> None:
    found = report(sample(0.1, [0.02]), sample(0.2, [0.03]), goals=Goals(first_token_ms=150))
    text = plot("a <b> & c", [found, found])
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    words = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert "a <b> & c" in words
    assert "target" in words


def test_prompts_have_about_the_length_asked_for_and_differ() -> None:
    prompts = Prompts(tokens_fixed=10, tokens_a_word=2.0, is_known=True)
    assert len(prompts.text(110, "1").split()) == 50
    assert prompts.text(110, "1") == prompts.text(110, "1") != prompts.text(110, "2")
    assert len(prompts.text(1, "1").split()) == 1
