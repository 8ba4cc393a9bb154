"""A Ray cluster that the user named: joined, used for one application, left as it was."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..runtime.errors import ConfigurationError
from .cluster_state import ClusterState
from .config import APP_NAME
from .nodes import Node, ray_nodes

CONNECT_TIMEOUT_S = 12.0
LOOK_TIMEOUT_S = 3.5  # of a head that is there a hundredth is enough

T = TypeVar("T")


class Taken(ConfigurationError):
    """An application of our name runs on the cluster already."""


class NoAddress(ConfigurationError):
    """What was given as an address can be none."""


class NamedRay:
    """Join and leave a cluster. Same shape as LocalRay."""

    is_ours = False
    logs: Path | None = None  # they are on the cluster's nodes
    chatter = Path(os.devnull)

    def __init__(self, address: str, origin: str) -> None:
        self.name = f"the Ray at {address} (named by {origin})"
        self._address = address
        self._origin = origin
        self._is_claimed = False
        self._started_serve = False

    def prepare(self) -> None:
        """Fail within seconds when nobody listens there, since Ray itself would try for long."""
        os.environ["RAY_SERVE_LOG_TO_STDERR"] = "0"
        if "RAY_AUTH_MODE" not in os.environ and _has_token():
            # Ray uses a token for an address of this machine by itself, for a named one only so.
            os.environ["RAY_AUTH_MODE"] = "token"
        if self._address == "auto":
            return
        host, _, port = self._address.rpartition(":")
        if not host or "://" in host or not port.isdigit():
            raise NoAddress(
                f"{self._origin} is {self._address!r}; give HOST:PORT, auto, or local for a "
                "Ray of its own"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"{self._origin} names the Ray cluster {self._address}, but nothing answers "
                f"there ({error}); "
                f"start it, or {self._remedy()}"
            ) from None

    def look(self) -> list[Node]:
        """Its nodes, and those that may come, without joining it: within LOOK_TIMEOUT_S after the
        import of Ray. Raises ConfigurationError where it does not answer, and Taken where an
        application of our name runs there.
        """
        # These imports take a second, which is not the cluster's.
        from ray._private.authentication import authentication_token_setup as token
        from ray._private.services import canonicalize_bootstrap_address

        def read() -> tuple[list[Node], bool]:
            token.ensure_token_if_auth_enabled(create_token_if_missing=False)
            cluster = ClusterState(canonicalize_bootstrap_address(self._address) or self._address)
            return ray_nodes(cluster), cluster.runs(APP_NAME)

        nodes, is_ours_there = self._ask(read, "reach", LOOK_TIMEOUT_S)
        if is_ours_there:
            raise self._taken()
        return nodes

    def start(self) -> None:
        """Join; raises ConfigurationError when that fails or takes more than CONNECT_TIMEOUT_S."""

        def connect() -> None:
            import logging

            import ray

            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)

        self._ask(connect, "join", CONNECT_TIMEOUT_S)

    def _ask(self, question: Callable[[], T], doing: str, limit_s: float) -> T:
        """The answer of a cluster that may never give one."""
        answers: list[T] = []
        failures: list[Exception] = []

        def ask() -> None:
            from ray.exceptions import RayError

            try:
                answers.append(question())
            except (RayError, RuntimeError, OSError, ValueError, TimeoutError) as error:
                failures.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(limit_s)
        if answers:
            return answers[0]
        reason = str(failures[0]).strip().splitlines()[0] if failures else "no answer in time"
        raise ConfigurationError(
            f"could not {doing} the Ray cluster {self._address} named by {self._origin}: "
            f"{reason}; "
            f"check its Ray and Python versions and its token, or {self._remedy()}"
        )

    def _taken(self) -> Taken:
        return Taken(
            f"{self.name} already runs an application named {APP_NAME}; stop that one first"
        )

    def _remedy(self) -> str:
        if self._origin == "RAY_ADDRESS":
            return "unset RAY_ADDRESS to let Polypath start a Ray of its own"
        return "leave --address out to let Polypath start a Ray of its own"

    def watch(self) -> None:
        """Nothing here was started by us."""

    def claim(self) -> None:
        """Refuse to replace an application of our name; note whether Serve runs already."""
        if not _has_serve():  # importing it takes seconds, and a refusal should not
            self._started_serve = self._is_claimed = True
            return
        from ray import serve

        status = serve.status()
        self._started_serve = not status.proxies and not status.applications
        if APP_NAME in status.applications:
            raise self._taken()
        self._is_claimed = True

    def stop(self, *, keep_logs: bool = False) -> None:
        """Take our application out, and Serve if we started it. The cluster stays."""
        import ray

        if not ray.is_initialized():
            return
        if self._is_claimed and _has_serve():
            from ray import serve

            from .pool_archive import forget

            if APP_NAME in serve.status().applications:  # else the start ended before that
                serve.delete(APP_NAME)
                forget(APP_NAME)
            if self._started_serve and not serve.status().applications:
                serve.shutdown()
        ray.shutdown()

    def kill(self) -> None:
        """Leave at once; the application may stay behind on the cluster."""


def _has_serve() -> bool:
    """Whether Serve's controller runs on the cluster that this process has joined."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _has_token() -> bool:
    """Whether this user holds a Ray token, in one of the places where Ray looks."""
    named = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or Path("~/.ray/auth_token").expanduser().is_file()
