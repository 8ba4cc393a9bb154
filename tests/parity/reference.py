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
    from transformers import GenerationConfig

    ids = torch.tensor([list(prompt_ids)])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    model.generation_config = config  # the model's own would add its end tokens
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt_ids) :].tolist()


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the reference's largest logit."""
    difference = (ours - reference).abs().max() / reference.abs().max()
    return float(difference.nan_to_num(nan=float("inf")))
