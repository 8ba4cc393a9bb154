"""What transformers computes in float32 with its plain attention: the yardstick of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def load_reference(folder: Path | str) -> Any:  # a transformers model; its classes are not typed
    """The model of a folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence in one pass."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


@torch.inference_mode()
def reference_greedy(model: Any, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that greedy decoding adds, end tokens not heeded."""
    ids = torch.tensor([list(prompt_ids)])
    step = model(ids, use_cache=True)
    found: list[int] = []
    while True:
        found.append(int(step.logits[0, -1].argmax()))
        if len(found) == count:
            return found
        step = model(
            torch.tensor([[found[-1]]]), past_key_values=step.past_key_values, use_cache=True
        )


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the reference's largest logit."""
    difference = (ours - reference).abs().max() / reference.abs().max()
    return float(difference.nan_to_num(nan=float("inf")))
