"""Writes the arrival traces of `polypath bench autoscale`: constant, diurnal and bursty, one hour
each, the same for the same seed.

    .venv/bin/python benchmarks/arrival_traces.py benchmarks/traces
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

HOUR_S = 3600.0
MEAN_PROMPT, MEAN_ANSWER, LONGEST = 200, 100, 1000  # tokens
Rate = Callable[[float], float]  # seconds since the start -> requests a second


def constant(_: float) -> float:
    """As many at any time."""
    return 1.2


def diurnal(time_s: float) -> float:
    """A day in an hour: from next to nothing at night to 3 a second, with a dip at noon."""
    day = 0.5 - 0.5 * math.cos(2 * math.pi * time_s / HOUR_S)
    noon = math.exp(-(((time_s / HOUR_S - 0.5) / 0.06) ** 2))
    return 0.02 + 3.0 * day**1.5 * (1 - 0.35 * noon)


def bursty(time_s: float) -> float:
    """Bursts of 4 a second for one to three minutes, and hardly anything between them."""
    bursts = ((240, 90), (780, 180), (1500, 60), (1680, 120), (2400, 60), (2880, 150))
    return 4.0 if any(start <= time_s < start + length for start, length in bursts) else 0.05


TRACES: dict[str, Rate] = {"constant": constant, "diurnal": diurnal, "bursty": bursty}


def trace(rate: Rate, seed: str) -> str:
    """Lines of `seconds,prompt tokens,answer tokens`: a Poisson process by thinning."""
    chance = random.Random(seed)
    most = max(rate(time_s) for time_s in range(int(HOUR_S)))
    lines, time_s = ["time_s,num_prompt,num_new"], 0.0
    while True:
        time_s += chance.expovariate(most)
        if time_s >= HOUR_S:
            return "\n".join(lines) + "\n"
        if chance.random() * most < rate(time_s):
            prompt, answer = (
                min(LONGEST, 1 + round(chance.expovariate(1 / mean)))
                for mean in (MEAN_PROMPT, MEAN_ANSWER)
            )
            lines.append(f"{time_s:.2f},{prompt},{answer}")


def main() -> None:
    """Each trace in a file of its own."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rate in TRACES.items():
        (folder / f"{name}.csv").write_text(trace(rate, name))


if __name__ == "__main__":
    main()
