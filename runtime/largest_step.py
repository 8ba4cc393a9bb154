"""The step that takes most memory: as many tokens and requests as a step may have, one of them at
the end of the longest context, and a token drawn by chance for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .forward_batch import ForwardBatch
from .kv.pages import SCRATCH_PAGE
from .models.decoder import Decoder
from .planning.plan import ExecutionPlan
from .request import Request, SamplingParams
from .runners.runner import Runner
from .sampler import build_sampler
from .scheduler import RequestState, ScheduledRow

DRAWN = SamplingParams(temperature=1.0, top_k=40, top_p=0.9)
"""Sampling that sorts: what takes most."""


def largest_rows(plan: ExecutionPlan) -> list[ScheduledRow]:
    """Requests whose pages are all the scratch page, so that a pool of that page alone will do."""
    num_rows = min(plan.max_num_seqs, plan.max_num_batched_tokens)
    left = plan.max_num_batched_tokens - num_rows
    longest = max(1, plan.max_model_len - 1)  # room for the drawn token
    rows = [_row(plan, "longest", longest, 1)]
    for index in range(num_rows - 1):
        more = min(left, longest - 1)
        left -= more
        rows.append(_row(plan, str(index), 1 + more, 1 + more))
    return rows


def _row(plan: ExecutionPlan, name: str, length: int, new: int) -> ScheduledRow:
    request = Request(id=name, prompt_ids=(0,) * length, sampling=DRAWN)
    state = RequestState(request, 0, length + 1)
    state.pages = [SCRATCH_PAGE] * -(-length // plan.page_size)
    state.num_computed = length - new
    return ScheduledRow(state, new, start=length - new)


@torch.inference_mode()
def run_largest(
    runner: Runner, model: Decoder, plan: ExecutionPlan, rows: Sequence[ScheduledRow]
) -> None:
    """One step over the rows, to its end. The pool's scratch page is written."""
    device = torch.device(plan.device)
    batch = ForwardBatch.build(rows, page_size=plan.page_size, device=device)
    config = model.config
    overlaps = plan.overlap_depth > 0
    sampler = build_sampler(config.vocab_size, device, config.eos_ids, overlaps=overlaps)
    sampler.sample(runner.run(batch), [row.state for row in rows]).to_host()
