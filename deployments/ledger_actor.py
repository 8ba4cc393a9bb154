"""The ledger as a Ray actor: one for all gateways, started by the first, gone after the last."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray

from .config import APP_NAME
from .ledger import Excess, KeyLimits, Ledger, Reservation, Standing

NAME = f"{APP_NAME}-ledger"
NAMESPACE = APP_NAME
IDLE_S = 60.0  # without any sign of a gateway: the application is gone


class LedgerActor:
    """A `Ledger` that ends its process when no gateway is left; it belongs to none of them, so that
    a gateway that is replaced takes no counts with it.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._ledger = Ledger()
        self._idle_s = idle_s
        self._renewed_s = time.monotonic()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def enter(self, gateway: str, key: str, limits: KeyLimits) -> Standing | Excess:
        return self._ledger.enter(gateway, key, limits)

    def reserve(self, key: str, limits: KeyLimits, tokens: int) -> Reservation | Excess:
        return self._ledger.reserve(key, limits, tokens)

    def settle(self, key: str, reservation: Reservation, used: int) -> None:
        self._ledger.settle(key, reservation, used)

    def leave(self, gateway: str, key: str) -> None:
        self._ledger.leave(gateway, key)

    def standing(self, key: str) -> Standing:
        return self._ledger.standing(key)

    def renew(self, gateway: str, running: dict[str, int]) -> int:
        """How many gateways there are."""
        self._renewed_s = time.monotonic()
        self._ledger.renew(gateway, running)
        return self._ledger.num_gateways()

    def _end_when_idle(self) -> None:
        while time.monotonic() - self._renewed_s < self._idle_s:
            time.sleep(min(5.0, self._idle_s / 4))
        os._exit(0)  # exit_actor works in calls only


def connect_ledger(*, idle_s: float = IDLE_S) -> Any:  # a handle, which Ray types by guessing
    """The actor, which is started when there is none. Blocks for some milliseconds."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(LedgerActor)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,  # a new one has new books, and has to be told what runs
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        )
        .remote(idle_s)
    )
