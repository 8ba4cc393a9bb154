"""Whether a device still computes. After a kernel's illegal address or a lost card every later call
of the process fails, so trying again, and serving on, would only fail more requests.
"""

from __future__ import annotations

from typing import Any

import torch


def why_lost(device: torch.device, cuda: Any = torch.cuda) -> str | None:
    """What a card says that answers no more; None where it answers. `cuda` is torch.cuda, or what a
    test puts in its place.
    """
    if device.type != "cuda":
        return None
    try:
        cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:200] or type(error).__name__
    return None
