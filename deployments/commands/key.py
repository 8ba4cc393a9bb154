"""`polypath key`: makes an API key, and the hash that a config may hold."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def key(
    hash_stdin: Annotated[
        bool,
        typer.Option(
            "--hash-stdin", help="Print the hash of the key on standard input; make none."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make an API key: the key for its user, the hash for the server's config or environment."""
    from ...runtime.errors import ConfigurationError
    from ..keys import hash_key, new_key

    if hash_stdin:
        # Standard input, since arguments stand in the list of processes.
        given = sys.stdin.readline().strip()
        if not given:
            raise ConfigurationError("standard input holds no key; give one line with the key")
        typer.echo(json.dumps({"hash": hash_key(given)}) if as_json else hash_key(given))
        return
    made = new_key()
    if as_json:
        typer.echo(json.dumps({"key": made, "hash": hash_key(made)}))
        return
    typer.echo(f"key   {made}")
    typer.echo(f"hash  {hash_key(made)}")
    typer.echo("Give the key to its user; it is stored nowhere. The server gets only the hash:")
    typer.echo("POLYPATH_API_KEYS=HASH[,HASH...], POLYPATH_ADMIN_KEYS for admins, or `auth` in")
    typer.echo("the config (docs/security.md).")
