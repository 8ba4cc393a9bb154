"""What `make gpu` asks of attention on a card, asked of the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polypath.kernels.triton import decode_attention

ROOT = Path(__file__).resolve().parents[5]
CPU = torch.device("cpu")


def test_the_checks_of_heads_pass_and_see_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_checks

    kinds = [gpu_checks.Heads((2, 1, 16), torch.float32, window=33, soft_cap=4.0)]
    (found,) = gpu_checks.check_heads(CPU, kinds)
    assert found.passed and found.name == "2/1 x 16, window 33, cap 4, pages 16 float32"
    monkeypatch.setattr(decode_attention, "decode_attention", lambda *args: None)
    (found,) = gpu_checks.check_heads(CPU, kinds)
    assert not found.passed
