"""`polypath serve`: everything from an empty machine to an API that answers, and back on Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer

from ...runtime.config import EngineConfig
from ..config import DEFAULT_HOST, DEFAULT_PORT, ServeConfig, cluster_address
from .engine_options import engine_options


@engine_options
def serve(
    config: EngineConfig,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 or :: for all of them.")
    ] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to use, HOST:PORT or auto; RAY_ADDRESS counts if this is not given. "
            "Without either, or with local, a Ray of its own is started and stopped.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's API until Ctrl-C."""
    from ...runtime.errors import ConfigurationError
    from ..serve_view import ServeView

    view = ServeView()
    try:
        named, origin = cluster_address(address)
        where = ServeConfig(host=host, port=port, address=named, address_origin=origin)
    except ConfigurationError as error:
        view.refuse(error)
        raise typer.Exit(2) from None
    from ..serving import serve as run

    raise typer.Exit(run(config, where, view))
