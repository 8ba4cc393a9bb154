"""When a worker would be done with a request: from its measured speed and all it already has."""

from __future__ import annotations

import heapq

from .served_worker import Job, Worker

PREFILL_TOKENS_S = 500.0  # of a worker that was never measured, so that unmeasured ones are equal
STEP_S = 0.05
STRANGER_TOKENS = 64  # that a request of another gateway may still generate
AHEAD = 1  # requests beyond its concurrency that a worker may hold, so that no step waits for us


class Forecast:
    """One worker's near future, as of now. Requests that will wait for it are added as they come.

    A decode step is taken to last as long as with all places taken that will be; prompts run one
    after another. So it is right under load, and too dark when nothing else comes.
    """

    def __init__(self, worker: Worker, now_s: float) -> None:
        self.worker = worker
        speeds = worker.speeds
        self.num_busy = worker.num_busy(now_s)
        self._prefill_tokens_s = speeds.prefill_tokens_s or PREFILL_TOKENS_S
        self._places = max(1, worker.concurrency)
        rows = min(self.num_busy + 1, self._places)
        self._step_s = speeds.decode_step_s(rows) or STEP_S
        self._prompt_tokens = sum(job.num_uncomputed for job in worker.jobs)
        self._free_s = self._ends(worker.jobs)

    def _ends(self, jobs: set[Job]) -> list[float]:
        """When each place is free, as a heap; others' requests are taken to be like the mean."""
        prefill_s = self._prompt_tokens / self._prefill_tokens_s
        lengths = [
            job.num_left * self._step_s + (prefill_s if job.num_uncomputed else 0.0) for job in jobs
        ]
        mean_s = sum(lengths) / len(lengths) if lengths else STRANGER_TOKENS * self._step_s
        lengths += [mean_s] * (self.num_busy - len(lengths))
        free_s = [0.0] * self._places
        for length in sorted(lengths):
            heapq.heapreplace(free_s, free_s[0] + length)
        return free_s

    @property
    def crowding(self) -> float:
        """Requests for each place."""
        return self.num_busy / self._places

    @property
    def wait_s(self) -> float:
        """Seconds until a place is free."""
        return self._free_s[0]

    def seconds(self, num_prompt: int, num_answer: int) -> float:
        """Seconds from now until the last token of one more request."""
        return self._free_s[0] + self._duration_s(num_prompt, num_answer)

    def add(self, num_prompt: int, num_answer: int) -> None:
        """Count with a request that will wait for this worker."""
        heapq.heapreplace(self._free_s, self.seconds(num_prompt, num_answer))

    def _duration_s(self, num_prompt: int, num_answer: int) -> float:
        queued = self._prompt_tokens if self._free_s[0] == 0.0 else 0
        return (num_prompt + queued) / self._prefill_tokens_s + num_answer * self._step_s

    def why_full(self, num_tokens: int, now_s: float, *, is_resumed: bool = False) -> str | None:
        """Why the worker could not start a request of `num_tokens` within a few steps, or None."""
        worker = self.worker
        if worker.is_draining:
            return "it is draining"
        if now_s < worker.closed_until_s:
            return "it refused or failed a request a moment ago"
        if not self.num_busy:
            return None
        places = worker.max_num_seqs if is_resumed else min(worker.concurrency, worker.max_num_seqs)
        if self.num_busy >= places + AHEAD:
            return f"it has {self.num_busy} requests and runs {places} at once"
        return self._why_no_pages(num_tokens, now_s)

    def _why_no_pages(self, num_tokens: int, now_s: float) -> str | None:
        load = self.worker.load(now_s)
        page_size = self.worker.plan_value("page_size")
        if load is None or not isinstance(page_size, int):
            return None
        needed = -(-num_tokens // page_size) + self.num_busy  # and a page for each to grow into
        if load.kv_pages_free >= needed:
            return None
        return f"it has {load.kv_pages_free} free pages of the {needed} needed to start"
