"""Our routing and power of two choices over loads, on paced workers and a virtual clock: the tables
of docs/routing.md. `python benchmarks/routing_loads.py` needs no Ray and no model.
"""

from __future__ import annotations

import argparse

from polypath.tests.paced_load import PacedLoad

FLEETS = {"1 fast, 1 slow": (0.01, 0.04), "1 fast, 3 slow": (0.01, 0.04, 0.04, 0.04)}
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.05)
GOAL_S = 0.4  # twice what the mean answer takes on a fast worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lengths-unknown", action="store_true")
    options = parser.parse_args()
    print(f"p95 and mean in s; good: within {GOAL_S} s; each: ours, ours with goal, power of two")
    for name, steps_s in FLEETS.items():
        print(f"\n| {name} | p95 | mean | good | p95 ratio | good ratio |\n|" + "---|" * 6)
        for load in LOADS:
            run = PacedLoad(
                steps_s=steps_s,
                load=load,
                num_requests=options.requests,
                are_lengths_known=not options.lengths_unknown,
            )
            print(_row(load, run))


def _row(load: float, run: PacedLoad) -> str:
    runs = [run.run("fastest"), run.run("fastest", GOAL_S), run.run("power_of_two")]
    p95 = [each[int(0.95 * len(each))] for each in runs]
    mean = [sum(each) / len(each) for each in runs]
    good = [sum(seconds <= GOAL_S for seconds in each) / len(each) for each in runs]
    cells = (
        f"{load:.0%}",
        " ".join(f"{seconds:.2f}" for seconds in p95),
        " ".join(f"{seconds:.2f}" for seconds in mean),
        " ".join(f"{share:.0%}" for share in good),
        " ".join(f"{p95[2] / seconds:.1f}x" for seconds in p95[:2]),
        " ".join(f"{share / good[2]:.2f}x" for share in good[:2]),
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
