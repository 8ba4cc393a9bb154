"""Put the application on a Ray that is there, and ask Serve how far it is. All calls here block."""

from __future__ import annotations

import logging
import secrets
import warnings
from dataclasses import dataclass

from ..runtime.config import EngineConfig
from ..runtime.errors import ConfigurationError, EngineError
from . import listen, startup
from .app import build_application
from .config import APP_NAME

GATEWAY_CPUS = 0.25
KEEP_ALIVE_S = 95  # clients keep idle connections for up to 90 s
QUIET = {"log_level": "WARNING", "enable_access_log": False}


class StartFailed(EngineError):
    """The worker or the gateway did not start; the text is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One look at a start: the worker's own record, and whether Serve and its proxies are up."""

    record: startup.StartupRecord
    is_serving: bool
    failure: str | None


class Deployment:
    """The application `polypath` on the Ray that this process is connected to."""

    def __init__(self, config: EngineConfig, *, max_running: int, num_gpus: int) -> None:
        self._config = config
        self._max_running = max_running
        self._num_gpus = num_gpus
        self._startup_key = f"start-{secrets.token_hex(4)}"
        self._url = ""

    def submit(self, host: str, port: int) -> None:
        """Start Serve if none runs, hand the application over, and return before it is ready.

        Raises ConfigurationError when a Serve that runs already listens elsewhere.
        """
        from ray import serve
        from ray.serve.api import RunTarget
        from ray.serve.config import HTTPOptions

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._url = listen.url(host, port)
        options = HTTPOptions(host=host, port=port, keep_alive_timeout_s=KEEP_ALIVE_S)
        serve.start(proxy_location="HeadOnly", http_options=options, logging_config=QUIET)
        _require_listening(host, port)
        application = build_application(
            self._config,
            worker_cpus=_free_cpus() - GATEWAY_CPUS,
            worker_gpus=self._num_gpus,
            gateway_cpus=GATEWAY_CPUS,
            max_running=self._max_running,
            startup_key=self._startup_key,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ray's about its own internals
            serve.run_many(
                [RunTarget(application, name=APP_NAME, logging_config=QUIET)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )

    def progress(self) -> Progress:
        """How far the start is."""
        from ray import serve

        record = startup.read(self._startup_key)
        if not record.is_ready and not record.failure:
            return Progress(record=record, is_serving=False, failure=_failure())
        status = serve.status()
        app = status.applications.get(APP_NAME)
        is_serving = (
            app is not None
            and app.status == "RUNNING"
            and bool(status.proxies)
            and all(proxy == "HEALTHY" for proxy in status.proxies.values())
        )
        return Progress(
            record=record,
            is_serving=is_serving and self._answers(),
            failure=record.failure or _failure(),
        )

    def _answers(self) -> bool:
        """Whether a request passes proxy, gateway and worker."""
        import httpx

        try:
            return httpx.get(f"{self._url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def record(self) -> startup.StartupRecord:
        """The worker's own record alone: one cheap read."""
        return startup.read(self._startup_key)


def _require_listening(host: str, port: int) -> None:
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve was started just now"
    options = client.http_config
    if (options.host, options.port) != (host, port):
        raise ConfigurationError(
            f"Serve already runs on this Ray and listens on {options.host}:{options.port}, "
            f"not on {host}:{port}; "
            f"ask for --host {options.host} --port {options.port}, or use another Ray"
        )


def _free_cpus() -> float:
    """CPUs free on the node that has most of them: the worker and the gateway go there."""
    from ray._private.state import available_resources_per_node

    free = max(
        (node.get("CPU", 0.0) for node in available_resources_per_node().values()), default=0
    )
    if free < 2 * GATEWAY_CPUS:
        raise ConfigurationError(
            f"no node of this Ray has a free CPU (at most {free:g} on one); stop what runs "
            "there or add a node"
        )
    return float(free)


def _failure() -> str | None:
    """Why Serve gave up, as one sentence."""
    from ray import serve

    app = serve.status().applications.get(APP_NAME)
    if app is None or app.status not in ("DEPLOY_FAILED", "UNHEALTHY"):
        return None
    for name, deployment in app.deployments.items():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        if lines and deployment.status != "HEALTHY":
            return f"the {name} did not start: {lines[-1]}"
    return app.message.strip().splitlines()[-1] if app.message.strip() else "Serve gave up"
