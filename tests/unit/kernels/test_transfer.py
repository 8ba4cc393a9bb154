"""Several tensors in one copy: packed bytes give back what went in."""

from __future__ import annotations

import pytest
import torch

from polypath.kernels.transfer import Arriving, all_to_device, pack, to_device, unpack

TENSORS = (
    torch.arange(5),
    torch.empty(0, dtype=torch.int64),
    torch.randn(3, 2, dtype=torch.float64),
    torch.arange(6, dtype=torch.int32).view(2, 3),
)


def test_packed_tensors_come_out_as_they_were() -> None:
    packed = pack(TENSORS)
    assert packed.dtype == torch.uint8
    for found, tensor in zip(unpack(packed, TENSORS), TENSORS, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_every_tensor_lies_where_triton_needs_no_kernel_of_its_own_for_it(num_tokens: int) -> None:
    ids, table = torch.arange(num_tokens), torch.ones(3, 7, dtype=torch.int32)
    packed = pack((ids, ids, table[:1], ids, table))
    found = unpack(packed, (ids, ids, table[:1], ids, table))
    assert {(t.data_ptr() - packed.data_ptr()) % 16 for t in found} == {0}


def test_on_a_cpu_nothing_is_copied() -> None:
    cpu = torch.device("cpu")
    assert to_device(TENSORS[0], cpu) is TENSORS[0]
    assert all(a is b for a, b in zip(all_to_device(TENSORS, cpu), TENSORS, strict=True))
    assert Arriving(TENSORS[0]).wait() == (TENSORS[0],)
