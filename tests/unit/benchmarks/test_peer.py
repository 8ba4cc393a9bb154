"""The peers' side of the protocol, and that the bench draws the same prompts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from polypath.runtime.bench import Workload, random_prompts

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_both_sides_draw_the_same_prompts() -> None:
    import peer

    theirs = peer.Workload(3, 8, 2).prompts(1000, seed=5)
    assert theirs == random_prompts(Workload(batch=3, prompt_tokens=8, new_tokens=2), 1000, 5)


def test_rates_leave_out_what_came_before_every_row_had_a_token() -> None:
    import peer

    run = peer.Run(
        prompt_tokens=80, generated_tokens=40, start=1.0, first=3.0, end=7.0, after_first=36
    )
    assert run.to_json()["prefill_tokens_s"] == 40.0
    assert run.to_json()["decode_tokens_s"] == 9.0
    assert run.seconds == 4.0


def test_a_given_setting_is_not_tuned_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import peer

    task = {"model": "m", "threads": 1, "vocab": 9, "first_seed": 0, "repeats": 2}
    points = [{"batch": 1, "prompt_tokens": 2, "new_tokens": 1}]
    line = json.dumps({**task, "workloads": points, "settings": [{"size": 7}]})
    monkeypatch.setattr(sys, "stdin", io.StringIO(line + "\n"))
    monkeypatch.setattr(peer, "end_with_parent", lambda: None)  # pytest goes on
    seen: list[int] = []

    def measure(workload: peer.Workload, settings: peer.Settings, prompts: object) -> peer.Run:
        seen.append(settings["size"])
        return peer.Run(2, 1, 0.0, 1.0, 1.0, 0)

    peer.answer(peer.read_task(), "1", lambda w: [{"size": 1}, {"size": 2}], measure)
    assert seen == [7, 7]
    assert json.loads(capsys.readouterr().out)["settings"] == [{"size": 7}]


def test_a_missing_package_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import peer

    with pytest.raises(SystemExit, match=r"no_such_package does not load in .* pip install it"):
        peer.need("no_such_package", "pip install\n it")


def test_llama_cpp_never_gets_a_micro_batch_smaller_than_a_step() -> None:
    import llamacpp_peer
    import peer

    for batch in (1, 8, 32, 128):
        for new_tokens in (1, 64):
            found = llamacpp_peer.choices(peer.Workload(batch, 64, new_tokens))
            assert found and all(choice["n_ubatch"] >= batch for choice in found)
