"""The terminal chat against a small HTTP server that speaks as ours does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from polypath.deployments.commands.chat import chat


class Handler(BaseHTTPRequestHandler):
    """Answers with the question's words; `boom` fails inside the stream, `long` before it."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "echo"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)  # type: ignore[attr-defined]
        text = body["messages"][-1]["content"]
        if text == "long":
            self._send("application/json", json.dumps({"error": {"message": "too long"}}), 400)
            return
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        ]
        events += [{"choices": [{"delta": {"content": word}}]} for word in text.split()]
        if text == "boom":
            events.append({"error": {"message": "the engine died"}})
        else:
            events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("text/event-stream", ": ping\n\n" + "".join(lines) + "data: [DONE]\n\n")

    def _send(self, kind: str, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Its `asked` holds the bodies received."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def run(server: ThreadingHTTPServer, text: str, *options: str) -> Any:  # click's Result
    app = typer.Typer()
    app.command()(chat)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return CliRunner().invoke(app, ["--url", url, *options], input=text)


def test_piped_lines_are_turns_of_one_conversation(server: Any) -> None:
    result = run(server, "one two\n\nthree\n/exit\nnever\n", "--system", "be brief")
    assert result.exit_code == 0
    assert result.stdout == "onetwo\nthree\n"
    assert [m["content"] for m in server.asked[1]["messages"]] == [
        "be brief",
        "one two",
        "onetwo",
        "three",
    ]
    assert server.asked[0]["model"] == "echo"
    assert server.asked[0]["temperature"] == 0.2


def test_clear_starts_over(server: Any) -> None:
    run(server, "one\n/clear\ntwo\n")
    assert [m["content"] for m in server.asked[1]["messages"]] == ["two"]


def test_a_failed_turn_is_said_and_forgotten(server: Any) -> None:
    result = run(server, "long\nboom\nfine\n")
    assert result.exit_code == 1
    assert "error: too long" in result.stderr
    assert "error: the engine died" in result.stderr
    assert [m["content"] for m in server.asked[2]["messages"]] == ["fine"]


def test_an_unknown_model_names_those_served(server: Any) -> None:
    result = run(server, "", "--model", "other")
    assert result.exit_code == 1
    assert "other is not served" in result.stderr
    assert "served: echo" in result.stderr


def test_nobody_there_says_how_to_start_one() -> None:
    app = typer.Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, ["--url", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:1; start it with `polypath serve`" in result.stderr
