"""What an engine has done since it started, as plain counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Only ever grows; tokens, requests and steps since start."""

    prompt_tokens: int = 0  # run through the model or taken from the prefix cache
    generation_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # by finish reason
    steps: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # mode, runner, reason
    overlap: Counter[str] = field(default_factory=Counter)  # how steps were launched at depth 1
    step_seconds: float = 0.0
    forward_seconds: float = 0.0  # the part of it spent in runners
    step_failures: int = 0

    def to_json(self) -> dict[str, object]:
        """Counters under the names that /metrics and /v1/paths use."""
        return {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "requests_total": dict(self.requests),
            "steps": [
                {"mode": mode, "runner": runner, "reason": reason, "count": n}
                for (mode, runner, reason), n in sorted(self.steps.items())
            ],
            "overlap": dict(self.overlap),
            "step_seconds_total": self.step_seconds,
            "forward_seconds_total": self.forward_seconds,
            "step_failures_total": self.step_failures,
        }
