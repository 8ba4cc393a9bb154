"""What gateways tell the scaling policy: plain numbers by name, since Serve's controller carries
nothing else. The rules travel with the load, so the policy needs no configuration of its own.

Names are `model/NUMBER/FIELD`, `pool/NUMBER/DEPLOYMENT/FIELD`, and, of demand that only some pools
can serve, `bound/NUMBER/DEPLOYMENT+DEPLOYMENT/FIELD`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .autoscaling import Memory, Scaling, scale
from .autoscaling_pools import Demand, PoolRules, PoolState, ScalingRules, Tokens

if TYPE_CHECKING:
    from .fleet import FleetSpec, ModelSpec
    from .served_model import ServedModel
    from .waiting import Able

Numbers = dict[str, float]
NOT_PREFERRED = -1.0
KINDS = ("model/", "pool/", "bound/")  # of what is reported
AND = "+"  # no deployment has it in its name


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """A pool as Serve's controller knows it."""

    ready: int
    target: int
    lacking_s: float = 0.0  # for so long it has had fewer than its target, and got none


@dataclass(kw_only=True, slots=True)
class Wish:
    """All that was reported of one thing: a model, a pool, or demand."""

    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def most(self, name: str) -> float:
        """The largest of what gateways say, who agree but for moments."""
        return max(self.numbers[name])

    def total(self, name: str) -> float:
        """Of all gateways together."""
        return sum(self.numbers[name])

    def mean(self, name: str) -> float:
        """Of those that know; 0.0 when none does."""
        known = [value for value in self.numbers[name] if value]
        return sum(known) / len(known) if known else 0.0


def numbers_of(
    number: int, model: ModelSpec, names: Mapping[str, str], served: ServedModel, now_s: float
) -> Numbers:
    """One gateway's report of one model. `names` are deployments by pool."""
    demands, rules = demands_of(served, now_s), model.scaling
    found = {
        f"model/{number}/{name}": float(value)
        for name, value in {
            "target_queue_s": rules.target_queue_s,
            "scale_down_delay_s": rules.scale_down_delay_s,
            "max_utilization": rules.max_utilization,
            **demand_fields(demands.get(None, Demand())),
        }.items()
    }
    for pool in model.pools:
        speeds = served.pool_speeds(pool.name)
        order = model.rules.prefer
        limits = pool.scaling_rules()
        values = {
            "min_workers": limits.min_workers,
            "max_workers": limits.max_workers,
            "price": limits.price,
            "cold_start_s": limits.cold_start_s,
            "order": order.index(pool.name) if pool.name in order else NOT_PREFERRED,
            "ready": sum(worker.pool == pool.name for worker in served.workers.values()),
            "prefill_tokens_s": speeds[0],
            "decode_tokens_s": speeds[1],
        }
        for name, value in values.items():
            found[f"pool/{number}/{names[pool.name]}/{name}"] = float(value)
    for able, demand in demands.items():
        if able is not None:
            which = AND.join(sorted(names[pool] for pool in able))
            for name, value in demand_fields(demand).items():
                found[f"bound/{number}/{which}/{name}"] = float(value)
    return found


def demands_of(served: ServedModel, now_s: float) -> dict[Able, Demand]:
    """What waits and runs, by the pools that can serve it; what runs, and not every pool could
    have begun, needs the one where it is.
    """
    found = served.line.demands(now_s)
    for worker in served.workers.values():
        for job in worker.jobs:
            able = frozenset({worker.pool}) if job.is_bound else None
            now = found.get(able, Demand())
            waiting = replace(now.waiting, prompt=now.waiting.prompt + job.num_uncomputed)
            found[able] = replace(now, waiting=waiting, num_unfinished=now.num_unfinished + 1)
    return found


def demand_fields(demand: Demand) -> dict[str, float]:
    """As numbers by name."""
    return {
        "arriving_prompt": demand.arriving.prompt,
        "arriving_new": demand.arriving.new,
        "waiting_prompt": demand.waiting.prompt,
        "waiting_new": demand.waiting.new,
        "unfinished": demand.num_unfinished,
    }


def report(fleet: FleetSpec, served: Mapping[str, ServedModel], now_s: float) -> Numbers:
    """One gateway's report of all models that have pools to scale."""
    from .fleet import deployment_name

    found: Numbers = {}
    for number, model in enumerate(fleet.models):
        known = served.get(model.name or "")
        if known is not None and any(pool.is_elastic for pool in model.pools):
            names = {pool.name: deployment_name(fleet, model, pool) for pool in model.pools}
            found |= numbers_of(number, model, names, known, now_s)
    return found


def decide(
    reports: Sequence[Numbers],
    views: Mapping[str, PoolView],
    memories: Mapping[str, list[tuple[float, int]]],
    now_s: float,
) -> dict[str, Scaling]:
    """What is wanted of each model's deployments, by number of the model.

    `views` and `memories` are by deployment; one that Serve does not scale has no view, and counts
    with what it has.
    """
    models: dict[str, Wish] = defaultdict(Wish)
    pools: dict[str, dict[str, Wish]] = defaultdict(lambda: defaultdict(Wish))
    bound: dict[str, dict[str, Wish]] = defaultdict(lambda: defaultdict(Wish))
    for numbers in reports:
        for name, value in numbers.items():
            kind, number, *rest = name.split("/")
            several = pools if kind == "pool" else bound
            wish = models[number] if kind == "model" else several[number][rest[0]]
            wish.numbers[rest[-1]].append(value)
    found: dict[str, Scaling] = {}
    for number, wish in models.items():
        demands = {frozenset(s.split(AND)): _demand(own) for s, own in bound[number].items()}
        ordered = [name for name in views if name in pools[number]]
        ordered += [name for name in pools[number] if name not in views]
        states = {name: _state(pools[number][name], views.get(name)) for name in ordered}
        memory: Memory = {name: memories[name] for name in ordered if memories.get(name)}
        rules = _rules(wish, pools[number])
        found[number] = scale(rules, states, _demand(wish), memory, now_s, demands)
    return found


def _rules(wish: Wish, pools: Mapping[str, Wish]) -> ScalingRules:
    preferred = [name for name, pool in pools.items() if pool.most("order") != NOT_PREFERRED]
    return ScalingRules(
        target_queue_s=wish.most("target_queue_s"),
        scale_down_delay_s=wish.most("scale_down_delay_s"),
        max_utilization=wish.most("max_utilization"),
        prefer=tuple(sorted(preferred, key=lambda name: pools[name].most("order"))),
    )


def _demand(wish: Wish) -> Demand:
    def tokens(what: str) -> Tokens:
        return Tokens(prompt=wish.total(f"{what}_prompt"), new=wish.total(f"{what}_new"))

    return Demand(
        arriving=tokens("arriving"),
        waiting=tokens("waiting"),
        num_unfinished=round(wish.total("unfinished")),
    )


def _state(wish: Wish, view: PoolView | None) -> PoolState:
    ready = round(wish.most("ready"))
    rules = PoolRules(
        min_workers=round(wish.most("min_workers")),
        max_workers=round(wish.most("max_workers")),
        price=wish.most("price"),
        cold_start_s=wish.most("cold_start_s"),
    )
    return PoolState(
        rules=rules,
        ready=ready if view is None else view.ready,
        target=rules.max_workers if view is None else view.target,
        prefill_tokens_s=wish.mean("prefill_tokens_s"),
        decode_tokens_s=wish.mean("decode_tokens_s"),
        lacking_s=0.0 if view is None else view.lacking_s,
    )
