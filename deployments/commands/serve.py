"""`polypath serve`: everything from an empty machine to an API that answers, and back on Ctrl-C."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.config import EngineConfig
from ...runtime.errors import ConfigurationError
from ..config import DEFAULT_HOST, DEFAULT_PORT, ServeConfig, cluster_address
from .engine_options import engine_options

if TYPE_CHECKING:
    from ..serve_preparation import ServeRequest


File = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A serve.yaml: models, each with pools of workers (docs/pools.md). MODEL and the "
        "engine's options then stand there.",
        show_default=False,
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only say whether it could work; start nothing.")
]
Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="A file of Ray's cluster launcher: its node types count as nodes that may come.",
        show_default=False,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        help=f"Address to listen on; 0.0.0.0 or :: for all of them.  [default: {DEFAULT_HOST}]",
        show_default=False,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        help=f"Port to listen on; 0 picks a free one.  [default: {DEFAULT_PORT}]",
        show_default=False,
    ),
]
Certificate = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Certificate chain (PEM): answer HTTPS.", show_default=False),
]
CertificateKey = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Its key (PEM, no password).", show_default=False),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to use, HOST:PORT or auto; RAY_ADDRESS counts if this is not given. "
        "Without either, or with local, a Ray of its own is started and stopped.",
        show_default=False,
    ),
]


@engine_options
def serve(
    config: EngineConfig,
    file: File = None,
    check: Check = False,
    cluster: Cluster = None,
    host: Host = None,
    port: Port = None,
    tls_cert: Certificate = None,
    tls_key: CertificateKey = None,
    address: Address = None,
) -> None:
    """Serve a model with OpenAI's API until Ctrl-C."""
    from ..serve_view import ServeView

    view = ServeView()
    try:
        request = _request(config, file, cluster, (host, port, address))
        request = _secured(request, tls_cert, tls_key)
    except ConfigurationError as error:
        view.refuse(error)
        raise typer.Exit(2) from None
    if check:
        from ..serve_preparation import check_only

        raise typer.Exit(check_only(request, view))
    from ..serving import serve as run

    raise typer.Exit(run(request, view))


def _request(
    config: EngineConfig,
    file: Path | None,
    cluster: Path | None,
    where: tuple[str | None, int | None, str | None],
) -> ServeRequest:
    """What was asked for, by the command line alone or by a file, where options win."""
    from ..fleet import plain_fleet
    from ..serve_preparation import ServeRequest

    host, port, address = where
    if file is None:
        fleet, in_file = plain_fleet(config), None
    else:
        from ..serve_config import read_serve_file

        _refuse_options_beside(file, config)
        found = read_serve_file(file)
        fleet, in_file = found.fleet, found.address
        host = host if host is not None else found.host
        port = port if port is not None else found.port
    named, origin = cluster_address(address, in_file)
    return ServeRequest(
        fleet=fleet,
        where=ServeConfig(
            host=DEFAULT_HOST if host is None else host,
            port=DEFAULT_PORT if port is None else port,
            address=named,
            address_origin=origin,
        ),
        launcher_file=cluster,
    )


def _secured(request: ServeRequest, cert: str | None, key: str | None) -> ServeRequest:
    """With the keys of the environment, and the certificate. Raises ConfigurationError."""
    from ..auth_config import with_environment
    from ..tls import check_tls

    fleet = replace(request.fleet, auth=with_environment(request.fleet.auth))
    return replace(request, fleet=fleet, where=replace(request.where, tls=check_tls(cert, key)))


def _refuse_options_beside(file: Path, config: EngineConfig) -> None:
    """A file says everything about models; nothing given beside it may be lost in silence."""
    given = ["MODEL"] * bool(config.model)
    for name, value in config.asked().items():
        given.append(("--no-" if value is False else "--") + name.replace("_", "-"))
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} cannot stand beside --config; write it into {file.name}"
        )
