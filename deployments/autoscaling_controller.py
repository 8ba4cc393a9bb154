"""The scaling policy inside Ray Serve's controller: reads what gateways report, asks
`autoscaling.py`, and keeps a journal that gateways show.

Missing numbers are not zero: without a fresh report every pool keeps its target. An exception is
caught, since Ray would stop scaling in silence; it is counted, logged, and shown.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..runtime.errors import EngineError
from .autoscaling import Scaling
from .autoscaling_pools import lack
from .autoscaling_report import KINDS, Numbers, PoolView, decide

logger = logging.getLogger("polypath.autoscaling")

STALE_S = 10.0  # numbers that have not been renewed for so long are missing
WRITE_S = 1.0  # the journal is not written more often
JOURNAL_KEY, NAMESPACE = "autoscaling", "polypath"
Contexts = Mapping[Any, Any]  # of Serve: DeploymentID -> AutoscalingContext
Decision = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


@dataclass(kw_only=True, slots=True)
class Journal:
    """What the policy last thought, and what went wrong; in Ray's key-value store for gateways."""

    errors: int = 0
    last_error: str = ""
    is_waiting: bool = False  # for a gateway's report
    models: dict[str, Any] = field(default_factory=dict)  # JSON
    _written: str = ""
    _written_s: float = -WRITE_S

    def text(self) -> str:
        return json.dumps(
            {
                "errors": self.errors,
                "last_error": self.last_error,
                "is_waiting": self.is_waiting,
                "models": self.models,
            }
        )

    def publish(self, now_s: float, write: Callable[[str], None]) -> None:
        """Write what changed, now and then."""
        text = self.text()
        if text != self._written and now_s - self._written_s >= WRITE_S:
            write(text)
            self._written, self._written_s = text, now_s


JOURNAL = Journal()  # of this process, which is the controller


class Freshness:
    """When each gateway's numbers last changed, by this process's own clock: clocks of nodes
    differ, and Serve keeps the last numbers of a gateway that says nothing more.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def is_fresh(self, gateway: str, sent_s: float, now_s: float) -> bool:
        """`sent_s` is the gateway's own time of its numbers."""
        last = self._seen.get(gateway)
        if last is None or last[0] != sent_s:
            self._seen[gateway] = (sent_s, now_s)
            return True
        return now_s - last[1] < STALE_S


FRESHNESS = Freshness()


def answer(contexts: Contexts, now_s: float | None = None) -> Decision:
    """Serve's question, every loop of its controller. Never raises."""
    now_s = time.monotonic() if now_s is None else now_s
    try:
        decision = _decide(contexts, now_s)
    except Exception:  # the edge of our code in Serve's process
        JOURNAL.errors += 1
        JOURNAL.last_error = traceback.format_exc(limit=3)
        logger.exception("the scaling policy failed; every pool keeps its target")
        decision = {}, {key: dict(context.policy_state) for key, context in contexts.items()}
    try:
        JOURNAL.publish(now_s, _write)
    except Exception:  # the store is away for a moment; scaling goes on
        logger.exception("the journal of the scaling policy cannot be written")
    return decision


def _decide(contexts: Contexts, now_s: float) -> Decision:
    kept = {key: dict(context.policy_state) for key, context in contexts.items()}
    reports = fresh_reports(contexts, now_s)
    JOURNAL.is_waiting = not reports
    if not reports:
        return {}, kept
    keys = {key.name: key for key in contexts}
    views = {
        key.name: PoolView(
            ready=each.current_num_replicas,
            target=each.target_num_replicas,
            lacking_s=_lacking_s(kept[key], each, now_s),
        )
        for key, each in contexts.items()
    }
    memories = {key.name: kept[key].get("wanted", []) for key in contexts}
    targets: dict[Any, int] = {}
    for number, scaling in decide(reports, views, memories, now_s).items():
        _note(number, scaling)
        for name, count in scaling.targets.items():
            if name in keys:
                targets[keys[name]] = count
                kept[keys[name]]["wanted"] = scaling.memory[name]
    return targets, kept


def _lacking_s(kept: dict[str, Any], context: Any, now_s: float) -> float:
    """For how long a deployment has had too few workers without getting one more; noted in what
    Serve keeps for us.
    """
    ready, target = context.current_num_replicas, context.target_num_replicas
    found = kept["lack"] = lack(kept.get("lack"), ready, target, now_s)
    return 0.0 if found is None else now_s - found[0]


def fresh_reports(contexts: Contexts, now_s: float) -> list[Numbers]:
    """The newest numbers of every gateway that still sends some."""
    found: dict[str, Numbers] = {}
    sent: dict[str, float] = {}
    for context in contexts.values():
        for name, by_replica in (context.raw_metrics or {}).items():
            if not name.startswith(KINDS):
                continue
            for replica, series in by_replica.items():
                if series:
                    gateway = str(replica)
                    found.setdefault(gateway, {})[name] = float(series[-1].value)
                    sent[gateway] = max(sent.get(gateway, 0.0), float(series[-1].timestamp))
    return [
        numbers
        for gateway, numbers in found.items()
        if FRESHNESS.is_fresh(gateway, sent[gateway], now_s)
    ]


def _note(number: str, scaling: Scaling) -> None:
    before = JOURNAL.models.get(number, {}).get("targets")
    JOURNAL.models[number] = scaling.to_json()
    if before != scaling.targets:
        logger.info("workers wanted: %s (%s)", scaling.targets, scaling.why)


def _write(text: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(JOURNAL_KEY, text.encode(), True, namespace=NAMESPACE)


def read_journal() -> dict[str, Any]:  # JSON
    """What the policy last wrote; empty before its first word. Blocks for a call to Ray's head.
    Raises EngineError.
    """
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        text = _internal_kv_get(JOURNAL_KEY, namespace=NAMESPACE)
    except (RayError, RuntimeError) as error:
        raise EngineError(f"Ray's head does not answer ({error}); ask again") from error
    return json.loads(text) if text else {}
