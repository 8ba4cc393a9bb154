"""Our scaling policy beside Ray Serve's default one on recorded arrivals, in virtual time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..runtime.errors import ConfigurationError
from ..runtime.speeds import Speeds
from .autoscaling_pools import PoolRules, ScalingRules
from .autoscaling_scalers import OurScaler, ServeDefaults, ServeScaler, grid
from .autoscaling_simulator import Arrival, Outcome, SimulatedPool, simulate

OURS, DEFAULT = "polypath", "Ray Serve, its defaults"
SAME_WAIT, BEST_WAIT = "Ray Serve, cheapest that waits no longer", "Ray Serve, best no dearer"
SLACK = 1.02  # queue times and costs this near are taken as equal
LEAST_WAIT_S = 0.1  # below it nobody waits; ratios count from here


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """What each policy made of one trace; the tuned ones only where a grid was tried."""

    trace: str
    num_arrivals: int
    outcomes: dict[str, Outcome]
    settings: dict[str, str]  # of Serve's policy, by name of the outcome

    def saving(self, other: str) -> float:
        """The share of the other's cost that ours saves; negative where ours is dearer."""
        return 1.0 - self.outcomes[OURS].cost / self.outcomes[other].cost

    def speedup(self, other: str, percent: float = 95) -> float:
        """How many times longer answers wait with the other, of those that wait longest."""
        ours, theirs = self.outcomes[OURS].wait_s(percent), self.outcomes[other].wait_s(percent)
        return max(theirs, LEAST_WAIT_S) / max(ours, LEAST_WAIT_S)

    def to_json(self) -> dict[str, Any]:  # JSON
        return {
            "trace": self.trace,
            "arrivals": self.num_arrivals,
            "policies": {
                name: {
                    "queue_s": {str(p): round(found.wait_s(p), 3) for p in (50, 95, 99, 100)},
                    "cost": round(found.cost, 4),
                    "starts": found.starts,
                    "settings": self.settings.get(name, ""),
                }
                for name, found in self.outcomes.items()
            },
        }


def read_trace(path: Path) -> list[Arrival]:
    """A CSV with the columns time_s, num_prompt, num_new. Raises ConfigurationError."""
    try:
        with path.open(newline="") as file:
            found = [
                Arrival(float(row["time_s"]), int(row["num_prompt"]), int(row["num_new"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no trace of arrivals: {error}; it needs the columns time_s, num_prompt and "
            "num_new"
        ) from None
    if not found or found != sorted(found, key=lambda arrival: arrival.time_s):
        raise ConfigurationError(f"{path}: arrivals must be there, and in the order of time")
    return found


def read_pools(path: Path) -> dict[str, SimulatedPool]:
    """A YAML list of pools, as in benchmarks/traces/pools.yaml. Raises ConfigurationError."""
    try:
        entries = yaml.safe_load(path.read_text())
        return {str(entry["name"]): _pool(entry) for entry in entries}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no list of simulated pools: {error}; benchmarks/traces/pools.yaml is one"
        ) from None


def _pool(entry: Mapping[str, Any]) -> SimulatedPool:  # YAML
    return SimulatedPool(
        rules=PoolRules(
            min_workers=entry["min_workers"],
            max_workers=entry["max_workers"],
            price=entry["price"],
            cold_start_s=entry["cold_start_s"],
        ),
        speeds=Speeds.from_json(entry),
        concurrency=entry["concurrency"],
    )


def contest(
    trace: str,
    arrivals: Sequence[Arrival],
    pools: Mapping[str, SimulatedPool],
    rules: ScalingRules,
    *,
    is_tuned: bool = False,
    on_run: Callable[[], None] = lambda: None,
) -> Contest:
    """Both policies on one trace; `is_tuned` also tries a grid of settings of Serve's policy."""
    by_price = tuple(sorted(pools, key=lambda name: pools[name].rules.price))
    serve = ServeDefaults()
    outcomes = {
        OURS: simulate(arrivals, pools, OurScaler(rules)),
        DEFAULT: simulate(arrivals, pools, ServeScaler(serve, by_price)),
    }
    settings = {DEFAULT: str(serve)}
    if is_tuned:
        tried: list[tuple[Outcome, str]] = []
        for option, order in grid({name: pools[name] for name in by_price}):
            found = simulate(arrivals, pools, ServeScaler(option, order))
            tried.append((found, f"{option}, {order[0]} first"))
            on_run()
        for name, best in _best(outcomes[OURS], tried).items():
            outcomes[name], settings[name] = best
    return Contest(trace=trace, num_arrivals=len(arrivals), outcomes=outcomes, settings=settings)


def _best(ours: Outcome, tried: Sequence[tuple[Outcome, str]]) -> dict[str, tuple[Outcome, str]]:
    """The cheapest setting whose p95 is no longer than ours, and the best p95 for our cost."""
    wait_s = max(ours.wait_s(95), LEAST_WAIT_S) * SLACK
    as_quick = [each for each in tried if each[0].wait_s(95) <= wait_s]
    as_cheap = [each for each in tried if each[0].cost <= ours.cost * SLACK]
    found: dict[str, tuple[Outcome, str]] = {}
    if as_quick:
        found[SAME_WAIT] = min(as_quick, key=lambda each: each[0].cost)
    if as_cheap:
        found[BEST_WAIT] = min(as_cheap, key=lambda each: each[0].wait_s(95))
    return found
