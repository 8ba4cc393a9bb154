"""`polypath chat`: talk to a running server from the terminal, one streamed answer a turn."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..api_client import ApiClient

HELP = "/exit or Ctrl-D ends, Ctrl-C stops an answer, /clear starts over"


def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Which model to ask; the first one served if not given.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[
        float, typer.Option(help="How freely words are chosen; small models ramble at 1.")
    ] = 0.2,
) -> None:
    """Chat with a running server. Text piped in is asked line by line."""
    from ..api_client import ApiClient, ApiClientError

    try:
        with ApiClient(url) as client:
            served = client.models()
            name = model or (served[0] if served else "")
            if name not in served:
                raise ApiClientError(
                    f"{name or 'no model'} is not served at {client.url}; served: "
                    f"{', '.join(served)}"
                )
            raise typer.Exit(Conversation(client, name, system, temperature).run())
    except ApiClientError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


class Conversation:
    """The turns so far and the loop that adds to them."""

    def __init__(
        self, client: ApiClient, model: str, system: str | None, temperature: float
    ) -> None:
        self._client = client
        self._model = model
        self._temperature = temperature
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        """Until the input ends; the exit code is 1 if a turn failed."""
        if self._is_terminal:
            typer.echo(f"{self._model} at {self._client.url}. {HELP}.")
        num_failed = 0
        for line in self._lines():
            if line == "/exit":
                break
            if line == "/clear":
                self._messages = list(self._opening)
            elif line:
                num_failed += not self._turn(line)
        return 1 if num_failed else 0

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from (line.strip() for line in sys.stdin)
            return
        import readline  # noqa: F401  # gives input() its editing and history

        while True:
            try:
                yield input("> ").strip()
            except KeyboardInterrupt:
                typer.echo(f"\n({HELP})")
            except EOFError:
                typer.echo()
                return

    def _ask(self, messages: list[dict[str, str]]) -> Generator[str]:
        return self._client.stream_chat(self._model, messages, temperature=self._temperature)

    def _turn(self, text: str) -> bool:
        """Ask and print; whether an answer came. A failed turn changes nothing."""
        from ..api_client import ApiClientError

        asked = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(self._ask(asked)) as pieces:
                for piece in pieces:
                    answer += piece
                    typer.echo(piece, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            typer.echo(" [stopped]", nl=False)
        except ApiClientError as error:
            typer.echo(f"{answer and chr(10)}error: {error}", err=True)
            return False
        typer.echo()
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return True
