"""What a request asks of the router, by headers: `x-polypath-require` and the others below."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..runtime.errors import RequestError
from ..runtime.request import SamplingParams
from .needs import HEADER as REQUIRE
from .needs import Needs, Requirement, parse_requirements
from .router import POLICIES, Policy, RoutingRules

PREFER = "x-polypath-prefer"
GOAL = "x-polypath-goal"
DEBUG = "x-polypath-debug"
POLICY = "x-polypath-policy"  # where the operator lets policies be compared
ROUTE = "x-polypath-route"  # of the answer
POOL = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MAX_POOLS = 16
LONGEST_GOAL_S = 7 * 24 * 3600.0
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteWish:
    """The headers, read."""

    requirements: tuple[Requirement, ...] = ()
    is_deterministic: bool = False
    prefer: tuple[str, ...] = ()
    spill: bool = True
    policy: Policy | None = None
    goal_s: float | None = None  # from arrival to the last token; an aim, not a limit
    explains: bool = False  # the answer is to say how its worker was chosen

    def needs(self, num_prompt: int, sampling: SamplingParams) -> Needs:
        """What one answer needs of a worker."""
        limit = sampling.max_tokens
        return Needs(
            num_tokens=num_prompt + (1 if limit is None else limit),
            features=features(sampling),
            requirements=self.requirements,
            is_deterministic=self.is_deterministic,
        )

    def rules(self, rules: RoutingRules) -> RoutingRules:
        """The model's rules, with what this request wants otherwise."""
        if self.policy is not None:
            rules = replace(rules, policy=self.policy)
        return replace(rules, prefer=self.prefer, spill=self.spill) if self.prefer else rules


def features(sampling: SamplingParams) -> frozenset[str]:
    """The features that a request uses, by the names in a worker's description."""
    used = {
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "penalties": any(getattr(sampling, name) != off for name, off in PENALTIES.items()),
        "logit_bias": bool(sampling.logit_bias),
    }
    return frozenset(name for name, is_used in used.items() if is_used)


def read_wish(
    headers: Mapping[str, str], *, compares_policies: bool = False, goal_s: float | None = None
) -> RouteWish:
    """Read the headers. `goal_s` is that of requests that name none. Raises `RequestError` that
    names the header that is wrong.
    """
    requirements, is_deterministic = parse_requirements(headers.get(REQUIRE, ""))
    prefer, spill = _parse_prefer(headers.get(PREFER, ""))
    debug = headers.get(DEBUG, "").strip()
    if debug not in ("", "route"):
        raise RequestError(f"{DEBUG} is {debug[:40]!a}; it must be 'route' or left out", DEBUG)
    return RouteWish(
        requirements=requirements,
        is_deterministic=is_deterministic,
        prefer=prefer,
        spill=spill,
        policy=_parse_policy(headers.get(POLICY, "").strip(), compares_policies),
        goal_s=_parse_goal(headers.get(GOAL, "").strip()) or goal_s,
        explains=bool(debug),
    )


def _parse_goal(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_GOAL_S:
        raise RequestError(
            f"{GOAL} is {text[:40]!a}; it must be a number of seconds above 0 and at most "
            f"{LONGEST_GOAL_S:.0f}",
            GOAL,
        )
    return seconds


def _parse_policy(text: str, is_allowed: bool) -> Policy | None:
    if not text:
        return None
    if not is_allowed:
        why = "is for comparing policies, which this server does not allow (api.compares_policies)"
        raise RequestError(f"{POLICY} {why}; leave it out", POLICY)
    if text not in POLICIES:
        raise RequestError(f"{POLICY} is {text[:40]!a}; it must be one of {POLICIES}", POLICY)
    return text


def _parse_prefer(text: str) -> tuple[tuple[str, ...], bool]:
    """`pool, pool ...`, then perhaps `; spill=no`."""
    names, _, option = text.partition(";")
    pools = tuple(name.strip() for name in names.split(",") if name.strip())
    option = option.strip()
    if option not in ("", "spill=no", "spill=yes"):
        raise RequestError(f"{PREFER} ends in {option[:40]!a}; it may end in '; spill=no'", PREFER)
    if len(pools) > MAX_POOLS or len(set(pools)) < len(pools) or not all(map(_is_pool, pools)):
        raise RequestError(
            f"{PREFER} is {text[:80]!a}; it must be at most {MAX_POOLS} names of pools, best "
            "first, joined by commas, each once",
            PREFER,
        )
    return pools, option != "spill=no"


def _is_pool(name: str) -> bool:
    return POOL.fullmatch(name) is not None
