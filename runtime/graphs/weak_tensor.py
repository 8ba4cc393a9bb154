"""A tensor as a launch in a graph knows it: an address, which does not keep its memory."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .mechanism import ReplayError


class WeakTensor:
    """Place and shape of a tensor whose memory others must keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._device = tensor.dtype, tensor.device
        self._offset = tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        """The tensor there. ReplayError when its memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise ReplayError(
                f"a tensor of shape {tuple(self._shape)} was freed since the graph was captured, "
                "which still has its address; keep it, or make it during the capture"
            )
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return empty.set_(storage, self._offset, self._shape, self._stride)
