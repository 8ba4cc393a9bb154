"""Settings of the serving layer, and the one place that reads our environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..runtime.errors import ConfigurationError
from .tls import TlsFiles

APP_NAME = "polypath"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

# Ray reads these in every process of a cluster, so they must be set before Ray starts.
RAY_ENVIRONMENT = {
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Serve's log lines stay in its files
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a FutureWarning
    # Despite its name: on any system, 0 makes a one-machine Ray use and listen on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Handle calls over gRPC and on the caller's own loop: 1.9 instead of 3.3 ms of CPU per streamed
    # chunk.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # What Ray does ten times a second when nothing happens takes 8 % of two cores, which the
    # engine's threads wait for; less often, 5 %. Nothing depends on it: roads break at once.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_task_events_report_interval_ms": "0",  # lists of calls, which nobody reads
    # What stands before Serve's proxy; cluster.yaml sets it for the head of a cluster too.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "polypath.deployments.proxy.middlewares",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Where the API listens and on which Ray it runs."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT  # 0 picks a free one
    address: str | None = None  # of the Ray cluster to join; None starts a Ray of our own
    address_origin: str = "--address"  # where `address` was given, for messages
    tls: TlsFiles | None = None  # HTTPS instead of HTTP

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigurationError("--host is empty; give an address such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(
                f"--port is {self.port}; it must be between 1 and 65535, or 0 for any free port"
            )


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key that commands send to a server: of the environment, since arguments stand in the
    list of processes.
    """
    return environ.get("POLYPATH_API_KEY") or None


def cluster_address(
    option: str | None, in_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str | None, str]:
    """The Ray cluster that the user named and where they named it; None when they want a Ray of
    their own.

    `--address` wins over the file of --config, and that over RAY_ADDRESS; the word `local` means
    an own Ray in all. No other trace of a running Ray is followed.
    """
    from_environment = environ.get("RAY_ADDRESS")
    given = (option, "--address"), (in_file, "address"), (from_environment, "RAY_ADDRESS")
    for address, origin in given:
        if address:
            return (None if address == "local" else address), origin
    return None, "default"
