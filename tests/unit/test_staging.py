"""Host numbers reach a device in stream order, and no buffer is written before it has been read."""

from __future__ import annotations

import torch

from polypath.runtime.staging import Staging
from polypath.tests.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def test_numbers_arrive_and_the_rest_stays() -> None:
    out = torch.full((5,), 9, dtype=torch.int32)
    Staging(CPU, 4).copy([3, 1, 2], out)
    assert out.tolist() == [3, 1, 2, 9, 9]


def test_a_buffer_waits_for_its_own_copy_and_no_other() -> None:
    cuda = FakeCuda()
    staging = Staging(CPU, 4, cuda=cuda, depth=2)
    out = torch.zeros(4, dtype=torch.int32)
    marks = []
    for value in range(2):
        cuda.streams.write(out)
        staging.copy([value], out)
        marks.append(dict(cuda.streams.default.known))
    assert cuda.streams.host == {}, "both buffers were free"
    cuda.streams.write(out)
    staging.copy([2], out)
    assert cuda.streams.host == marks[0]
    assert out.tolist() == [2, 0, 0, 0]
