"""A Ray of our own: started for one `polypath serve`, reachable from this machine only, gone with
it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..runtime.errors import ConfigurationError, EngineError
from . import prestart
from .config import RAY_ENVIRONMENT
from .processes import Family
from .ray_lean import lean_ray

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's least is 75 MB; tokens do not pass through it
START_ERRORS = (RuntimeError, OSError, ValueError, TimeoutError)
MAX_SOCKET_PATH = 107  # bytes that Linux allows
# Ray makes its temporary folder, and the sockets in it, open to every user of the machine (0777):
# so it gets one inside a folder that only we may enter.
INNER = "ray"
SOCKET_SUFFIX = len(
    f"/{INNER}/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.12345"
)


class LocalRay:
    """Start and stop a private Ray. The thread that calls `start` must live on: Ray's processes die
    with it.
    """

    name = "a Ray of its own"
    is_ours = True

    def __init__(
        self,
        *,
        num_cpus: int,
        num_gpus: int,
        environment: Mapping[str, str],
        starts_worker: bool = False,
    ) -> None:
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus
        self._environment = {**RAY_ENVIRONMENT, **environment}
        self._starts_worker = starts_worker  # at once, so that its process may prepare itself
        self._folder: Path | None = None
        self._family = Family()

    @property
    def chatter(self) -> Path:
        """Where what Ray prints in this process goes; after `prepare`."""
        assert self._folder is not None, "prepare makes the folder"
        return self._folder / "driver.log"

    @property
    def logs(self) -> Path | None:
        """Where Ray's and the workers' logs are while it runs."""
        return self._folder / INNER / "session_latest" / "logs" if self._folder else None

    def prepare(self) -> None:
        """Choose the folder and set the variables that Ray's processes inherit; before `import
        ray`.
        """
        os.environ.update(self._environment)
        os.environ.pop("RAY_ADDRESS", None)  # Ray's own processes would read it
        if "RAY_AUTH_MODE" not in os.environ:
            # A token of this run keeps other users of the machine out and leaves no file at home.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        self._folder = private_folder()
        if self._starts_worker:
            os.environ.update(prestart.environment(self._folder))
            prestart.leave_out()

    def start(self) -> None:
        """Start all of Ray's processes (about 4 s). Raises ConfigurationError with Ray's reason."""
        import logging

        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        assert self._folder is not None, "prepare makes the folder"
        try:
            with lean_ray() as dashboard_port:
                ray.init(
                    address="local",  # never join a Ray that happens to run here
                    num_cpus=self.num_cpus,
                    num_gpus=self.num_gpus,
                    include_dashboard=False,
                    dashboard_port=dashboard_port,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self._folder / INNER),
                )
        except Exception as error:
            # A bare Exception is what Ray raises when its node is not up after 30 s.
            if type(error) is not Exception and not isinstance(error, START_ERRORS):
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"Ray did not start: {reason[0]} (logs under {self._folder})"
            ) from error
        self._family.look()

    def watch(self) -> None:
        """Take note of processes started since, so that `stop` can make sure of them. Raises
        EngineError when Ray itself is gone: it does not come back, and all others would go within
        a minute, without a word.
        """
        self._family.look()
        for program in ("gcs_server", "raylet"):
            if self._family.has_lost(program):
                raise EngineError(
                    f"Ray's process {program} has ended: killed, or out of memory? Nothing works "
                    "without it; start again"
                )

    def stop(self, *, keep_logs: bool = False) -> None:
        """End every process and remove the folder; call it on the thread that called `start`."""
        import ray

        self._family.look()
        ray.shutdown()
        self._family.wait_or_kill(grace_s=2.0)
        if self._folder and not keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """The hard way, from any thread: no goodbye, no process left."""
        self._family.kill()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> Path:
    """A new folder only we can read, with a path short enough for the sockets that Ray makes in it.

    RAY_TMPDIR, then TMPDIR, then /tmp and /dev/shm: the first one that is short enough and can be
    written. A /tmp/ray of
    somebody else is never touched.
    """
    passed: list[str] = []
    for name in ("RAY_TMPDIR", "TMPDIR", ""):
        for parent in [os.environ.get(name)] if name else ["/tmp", "/dev/shm"]:
            if not parent:
                continue
            if len(os.path.join(parent, "polypath-12345678")) + SOCKET_SUFFIX > MAX_SOCKET_PATH:
                passed.append(
                    f"{name or parent} is {len(parent)} characters long, too long for sockets"
                )
                continue
            try:
                return Path(tempfile.mkdtemp(prefix="polypath-", dir=parent))
            except OSError as error:
                passed.append(f"{name or parent}: {error.strerror} ({parent})")
    raise ConfigurationError(
        f"no folder for Ray's sockets and logs: {'; '.join(passed)}. Set RAY_TMPDIR to a "
        "short path you may write to"
    )
