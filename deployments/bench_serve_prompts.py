"""Prompts of a wanted number of tokens for a server whose tokenizer is not known."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .bench_serve_client import BenchError, Sample, Target, ask

if TYPE_CHECKING:
    import aiohttp

SYLLABLES = ("ba", "co", "di", "fu", "ga", "ho", "ki", "lu", "me", "no", "pa", "re", "si", "tu")
PROBES = (8, 64)  # words


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random words, so that no two prompts share a beginning: tokens = fixed + each x words."""

    tokens_fixed: float = 0.0
    tokens_a_word: float = 1.0
    is_known: bool = False  # whether the server counts prompt tokens

    def text(self, num_tokens: int, seed: str) -> str:
        """About `num_tokens` as the server counts them, its chat template included."""
        rng = random.Random(seed)
        num_words = max(1, round((num_tokens - self.tokens_fixed) / self.tokens_a_word))
        return " ".join(words(rng, num_words))


def words(rng: random.Random, count: int) -> list[str]:
    """Words of two syllables that nobody has said before in this order."""
    return ["".join(rng.choices(SYLLABLES, k=2)) for _ in range(count)]


async def learn_prompts(session: aiohttp.ClientSession, target: Target) -> tuple[Prompts, Target]:
    """Ask twice and see how the server counts; also whether it knows `ignore_eos`.

    Raises BenchError when it does not answer at all.
    """
    counts: list[int] = []
    for number, num_words in enumerate(PROBES):
        text = " ".join(words(random.Random(f"probe {number}"), num_words))
        sample = await ask(session, target, text, 2, time.monotonic())
        if sample.error == "http_400" and "ignore_eos" in sample.detail and target.ignore_eos:
            target = replace(target, ignore_eos=False)
            sample = await ask(session, target, text, 2, time.monotonic())
        _require_answer(target, sample)
        if sample.prompt_tokens is not None:
            counts.append(sample.prompt_tokens)
    if len(counts) < 2 or counts[1] <= counts[0]:
        return Prompts(), target
    slope = (counts[1] - counts[0]) / (PROBES[1] - PROBES[0])
    return Prompts(counts[0] - slope * PROBES[0], slope, True), target


def _require_answer(target: Target, sample: Sample) -> None:
    if sample.error not in (None, "empty_answer"):  # two tokens may well have no text
        raise BenchError(
            f"a first request to {target.url}{target.path} failed ({sample.error}): "
            f"{sample.detail or 'no more is known'}"
        )
