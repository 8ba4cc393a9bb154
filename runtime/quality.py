"""What rounding costs: perplexity on a text, and where greedy continuations part from those of
another engine with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .engine import Engine
from .request import SamplingParams

NEAR_TIE = 0.3  # of log-probability; texts part legitimately where two tokens are nearer than this
NUM_RIVALS = 20  # likeliest tokens among which the other engine's is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """One prompt's greedy continuation beside the reference's."""

    differs_at: int | None  # token of the first difference; None: all equal
    gap: float | None = 0.0  # of the reference's log-probabilities there; None: beyond its rivals

    @property
    def holds(self) -> bool:
        """Equal, or parted at a near-tie."""
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """An engine against a reference on the same weights."""

    num_scored: int  # tokens whose log-probability was summed
    perplexity: float
    reference_perplexity: float
    continuations: tuple[Continuation, ...]

    @property
    def ratio(self) -> float:
        """Perplexity over the reference's: 1.01 is one percent worse."""
        return self.perplexity / self.reference_perplexity

    @property
    def share_held(self) -> float:
        """Share of continuations that are equal or part at a near-tie."""
        return sum(c.holds for c in self.continuations) / len(self.continuations)


def compare(
    engine: Engine,
    reference: Engine,
    ids: Sequence[int],
    *,
    window: int = 512,
    num_prompts: int = 20,
    prompt_tokens: int = 48,
    new_tokens: int = 64,
) -> Quality:
    """Score all windows of a text, and continue `num_prompts` pieces of it, evenly spread."""
    prompts = pieces(ids, num_prompts, prompt_tokens)
    scores, expected = (log_likelihood(each, ids, window) for each in (engine, reference))
    return Quality(
        num_scored=scores[1],
        perplexity=math.exp(-scores[0] / scores[1]),
        reference_perplexity=math.exp(-expected[0] / expected[1]),
        continuations=tuple(continuations(engine, reference, prompts, new_tokens)),
    )


def pieces(ids: Sequence[int], count: int, length: int) -> list[Sequence[int]]:
    """`count` pieces of `length` tokens, the first at the start, the last at the end."""
    room = len(ids) - length
    assert count > 0 and room >= 0, "the text is shorter than one piece"
    starts = [round(i * room / max(1, count - 1)) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def log_likelihood(engine: Engine, ids: Sequence[int], window: int) -> tuple[float, int]:
    """(sum of log-probabilities, tokens scored); each window's first token has nothing before it
    and is not scored.
    """
    windows = [ids[at : at + window] for at in range(0, len(ids), window)]
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = [
        score.logprob
        for answer in engine.generate(windows, sampling)
        for score in answer.prompt_logprobs or ()
        if score is not None
    ]
    return sum(scores), len(scores)


def continuations(
    engine: Engine, reference: Engine, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Continuation]:
    """Greedy continuations of each prompt, compared up to the first difference."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=NUM_RIVALS
    )
    found = []
    pairs = zip(
        engine.generate(prompts, sampling), reference.generate(prompts, sampling), strict=True
    )
    for ours, theirs in pairs:
        ids = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        first = next((i for i, (a, b) in ids if a != b), None)
        if first is None:
            found.append(Continuation(differs_at=None))
            continue
        rivals = dict(theirs.logprobs[first].top)
        said = ours.token_ids[first]
        gap = theirs.logprobs[first].logprob - rivals[said] if said in rivals else None
        found.append(Continuation(differs_at=first, gap=gap))
    return found
