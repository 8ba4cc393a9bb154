"""How long the answers of a model tend to be, which is what a request will likely cost."""

from __future__ import annotations

from ..runtime.request import SamplingParams

FIRST_GUESS = 128.0  # tokens
WEIGHT = 0.05  # of one answer in the moving average


class AnswerLength:
    """A moving average over answers that ended."""

    def __init__(self) -> None:
        self._mean = FIRST_GUESS

    def observe(self, num_tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._mean += WEIGHT * (num_tokens - self._mean)

    @property
    def mean(self) -> float:
        """Tokens of an answer, lately."""
        return self._mean

    def expected(self, sampling: SamplingParams) -> int:
        """Tokens that an answer with these rules will likely have; at least 1."""
        limit = sampling.max_tokens
        if limit is not None and is_known(sampling):
            return max(1, limit)
        guess = max(round(self._mean), sampling.min_tokens, 1)
        return guess if limit is None else max(1, min(guess, limit))


def is_known(sampling: SamplingParams) -> bool:
    """Whether an answer with these rules is just as long as it may be."""
    ends_itself = not sampling.ignore_eos or bool(sampling.stop_token_ids)
    return sampling.max_tokens is not None and not ends_itself
