"""A local Ray without the processes that nothing of ours talks to: they take a third of its start.

On two cores `ray.init` takes 3.8 s without them, 5.7 to 7.2 with. Ray has no public switch: should
its next version have moved these ones, it starts as ever, which the log and
tests/ray/test_live_app.py say.
"""

from __future__ import annotations

import inspect
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)

LEAN = {
    "no_monitor": True,  # of Ray's autoscaler, which has nothing to start on one machine
    "include_log_monitor": False,  # sends workers' output to drivers, which log_to_driver refuses
    "dashboard_agent_listen_port": 0,  # any: where it is taken Ray tries it again for 3 s
}


@contextmanager
def lean_ray() -> Iterator[int]:
    """Around `ray.init`, which gets no dashboard and, as its port, what this gives."""
    with socket.socket() as taken, _lean_parameters():
        # Of its dashboard Ray starts the process even where none is wanted, unless the port that
        # was asked for is taken: without a dashboard that is an error in the log, and no more.
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def _lean_parameters() -> Iterator[None]:
    module = _parameter_module()
    usual = getattr(module, "RayParams", None)
    known = set(inspect.signature(usual).parameters) if callable(usual) else set()
    if missing := sorted(set(LEAN) - known):
        logger.warning("this Ray has no %s: it starts slower", ", ".join(missing))
        yield
        return
    assert module is not None and callable(usual), "it has all parameters"
    module.RayParams = partial(usual, **LEAN)
    try:
        yield
    finally:
        module.RayParams = usual


def _parameter_module() -> Any:  # a private module of Ray's, or None where it is no more
    try:
        return import_module("ray._private.parameter")
    except ImportError:
        return None
