"""Runs a batch on the first planned runner that takes it, and says which one ran and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .forward_batch import ForwardBatch
from .forward_mode import ForwardMode
from .logits import Logits
from .runners.runner import Reason, Runner

logger = logging.getLogger(__name__)


class ModelRunner:
    """The runners of each mode, best first; eager closes every list."""

    def __init__(self, runners: Mapping[ForwardMode, Sequence[Runner]]) -> None:
        assert all(r[-1].name == "eager" for r in runners.values()), "eager ends every list"
        self._runners = runners

    def forward(self, batch: ForwardBatch) -> tuple[Logits, str, Reason]:
        """Logits [R, V], the runner that ran, and the reason. A failing step is retried once,
        eagerly.
        """
        runner, reason = self._choose(batch)
        try:
            return runner.run(batch), runner.name, reason
        except RuntimeError:  # what torch raises, out of memory included
            logger.exception("a %s step failed on %s; trying it once more", batch.mode, runner.name)
        eager = self._runners[batch.mode][-1]
        return eager.run(batch), eager.name, Reason.RETRY_AFTER_FAILURE

    def _choose(self, batch: ForwardBatch) -> tuple[Runner, Reason]:
        declined = Reason.PLANNED
        for runner in self._runners[batch.mode]:
            reason = runner.why_not(batch)
            if reason is None:
                return runner, declined
            declined = reason if declined is Reason.PLANNED else declined
        raise AssertionError("eager takes every batch")
