"""What a request's headers ask of the router: `x-polypath-require`, `-prefer`, `-debug`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..runtime.errors import RequestError
from ..runtime.request import SamplingParams
from .needs import HEADER as REQUIRE
from .needs import Needs, Requirement, parse_requirements
from .router import RoutingRules

PREFER = "x-polypath-prefer"
DEBUG = "x-polypath-debug"
ROUTE = "x-polypath-route"  # of the answer
POOL = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
MAX_POOLS = 16
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteWish:
    """The headers, read."""

    requirements: tuple[Requirement, ...] = ()
    is_deterministic: bool = False
    prefer: tuple[str, ...] = ()
    spill: bool = True
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
        """The model's rules, with this request's own order of pools where it has one."""
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


def read_wish(headers: Mapping[str, str]) -> RouteWish:
    """Read the three headers. Raises `RequestError` that names the one that is wrong."""
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
        explains=bool(debug),
    )


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
