"""Put the application on a Ray that is there, and ask Serve how far it is. All calls here block."""

from __future__ import annotations

import asyncio
import logging
import secrets
import warnings
from dataclasses import replace

from ..runtime.errors import EngineError
from . import listen, startup
from .app import NAME, build_application, packed
from .autoscaling_serve import POLICY
from .config import APP_NAME
from .fleet import FleetSpec, deployment_name, pool_title
from .front import FrontAddress
from .pool_start import PoolStart, Progress
from .tls import TlsFiles

logger = logging.getLogger("polypath.deploy")

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
GOODBYE_LIMIT_S = 2.5
QUIET = {"log_level": "WARNING", "enable_access_log": False}


class StartFailed(EngineError):
    """The worker or the gateway did not start; the text is the reason."""


class Deployment:
    """The application `polypath` on the Ray that this process is connected to."""

    def __init__(self, fleet: FleetSpec) -> None:
        self._fleet = fleet
        self._startup_key = f"start-{secrets.token_hex(4)}"
        self._url = ""
        self._tls: TlsFiles | None = None

    def submit(self, host: str, port: int, tls: TlsFiles | None = None) -> None:
        """Start Serve if none runs, hand the application over, and return before it is ready.

        The gateway listens itself, on this node; of Serve no proxy is needed.
        """
        import ray
        from ray import serve
        from ray.serve.api import RunTarget

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._tls = tls
        self._url = listen.url(host, port, is_tls=tls is not None)
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        node_id = ray.get_runtime_context().get_node_id()
        front = FrontAddress(host=host, port=port, tls=tls, node_id=node_id)
        if self._fleet.is_elastic:
            self._declare(front)
            return
        application = build_application(self._fleet, startup_key=self._startup_key, front=front)
        # No route: should this Serve have a proxy, its address and its TLS are not those asked for.
        target = RunTarget(application, name=APP_NAME, route_prefix=None, logging_config=QUIET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ray's about its own internals
            serve.run_many(
                [target],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )

    def _declare(self, front: FrontAddress) -> None:
        """Hand the application over in Serve's declarative form, which alone takes a policy over
        all pools; other applications of that form stay.
        """
        from ray.serve.context import _get_global_client
        from ray.serve.schema import LoggingConfig, ServeApplicationSchema, ServeDeploySchema

        client = _get_global_client()
        assert client is not None, "Serve was started above"
        ours = ServeApplicationSchema(
            name=APP_NAME,
            route_prefix=None,
            import_path="polypath.deployments.app:unpacked",
            args=packed(self._fleet, self._startup_key, front),
            autoscaling_policy={"policy_function": POLICY},
            logging_config=LoggingConfig(**QUIET),
        )
        there = client.get_serve_details()["applications"].values()
        others = [
            ServeApplicationSchema(**each["deployed_app_config"])
            for each in there
            if each.get("deployed_app_config") and each["name"] != APP_NAME
        ]
        client.deploy_apps(ServeDeploySchema(applications=[*others, ours]))

    def progress(self) -> Progress:
        """How far the start is."""
        from ray import serve

        pools = self.pools()
        failure = next((pool.failure for pool in pools if pool.failure), None)
        progress = Progress(pools=pools, is_serving=False, failure=failure or _failure())
        if not progress.is_ready or progress.failure:
            return progress
        app = serve.status().applications.get(APP_NAME)
        is_serving = app is not None and app.status == "RUNNING"
        return replace(progress, is_serving=is_serving and self._answers())

    def _answers(self) -> bool:
        """Whether a request passes gateway and worker."""
        import httpx

        try:
            verify = self._tls.client_context() if self._tls else True
            url = f"{self._url}/health"
            return httpx.get(url, timeout=5, verify=verify).status_code == 200
        except httpx.HTTPError:
            return False

    def say_goodbye(self) -> None:
        """Have the gateway tell its clients that it stops, if it can at once."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        async def ask() -> None:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                await serve.get_deployment_handle(NAME, APP_NAME).say_goodbye.remote()

        try:
            asyncio.run(ask())
        except (RayError, RayServeException, TimeoutError, RuntimeError, OSError) as error:
            logger.info("clients were not told that the server stops: %s", type(error).__name__)

    def pools(self) -> list[PoolStart]:
        """The workers' own records alone: cheap reads."""
        found = []
        for model, pool in self._fleet.pools():
            name = deployment_name(self._fleet, model, pool)
            found.append(
                PoolStart(
                    title=pool_title(self._fleet, model, pool),
                    num_workers=pool.num_workers,
                    records=startup.read_all(f"{self._startup_key}/{name}/"),
                    is_elastic=pool.is_elastic,
                )
            )
        return found


def _failure() -> str | None:
    """Why Serve gave up, as one sentence."""
    from ray import serve

    app = serve.status().applications.get(APP_NAME)
    if app is None or app.status not in FAILED:
        return None
    failed = [(n, d) for n, d in app.deployments.items() if d.status in FAILED]
    others = [(n, d) for n, d in app.deployments.items() if d.status not in (*FAILED, "HEALTHY")]
    for name, deployment in failed + others:  # others may just be slow
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        if lines:
            return f"the {name} did not start: {lines[-1]}"
    return app.message.strip().splitlines()[-1] if app.message.strip() else "Serve gave up"
