"""torch, imported with the garbage collector paused. It makes some 200,000 objects that stay, and
looking through them again and again takes a fifth of the time. Import this module before others
that import torch.
"""

from __future__ import annotations

from .collector import paused

with paused():
    import torch as torch
