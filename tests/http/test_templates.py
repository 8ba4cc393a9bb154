"""Chat templates that are missing, raise, loop or read parts: each request gets its own answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from polypath.deployments.gateway import Gateway
from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.tests.http.fakes import FakeLink, client_of, ids_of
from polypath.tests.tiny_models import write_folder

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %};{% endfor %}"
)


async def chat(
    folder: Path, template: str | None, *messages: Any, **body: Any
) -> tuple[Any, FakeLink]:
    write_folder(folder, template=template)
    (folder / "model.safetensors").write_bytes(b"")
    gateway, link = Gateway(), FakeLink()
    gateway.add_checkpoint(open_checkpoint(str(folder), weights=False), name="tiny")
    await gateway.add_worker(link)
    async with client_of(gateway) as client:
        response = await client.post("/v1/chat/completions", json={"messages": messages} | body)
    gateway.close()
    return response, link


async def test_a_model_without_a_template_names_the_option_and_the_other_endpoint(
    tmp_path: Path,
) -> None:
    response, _ = await chat(tmp_path, None, USER)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert all(word in message for word in ("tiny", "--chat-template", "/v1/completions"))


async def test_what_a_template_raises_is_a_400_with_its_own_sentence(tmp_path: Path) -> None:
    response, link = await chat(tmp_path, ALTERNATE, USER, USER)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "roles must alternate"
    assert not link.requests


async def test_a_template_that_loops_is_stopped(tmp_path: Path) -> None:
    start = time.monotonic()
    response, _ = await chat(tmp_path, "{% for i in range(10**9) %}x{% endfor %}", USER)
    assert response.status_code == 400
    assert time.monotonic() - start < 20


async def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, link = await chat(tmp_path, PARTS, {"role": "user", "content": parts})
    assert list(link.requests[0].prompt_ids) == ids_of("[a][b]")


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": 1}', '{"a": 1}'), ("no json", '"no json"'), ("", "{}")]
)
async def test_tool_calls_reach_a_template_that_knows_them(
    tmp_path: Path, arguments: str, shown: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}):
        message = {"role": "assistant", "tool_calls": [call]} | content
        response, link = await chat(tmp_path, TOOLS, USER, message)
        assert "warnings" not in response.json()["polypath"]
        prompts.append(list(link.requests[0].prompt_ids))
    assert prompts == [ids_of(f"user:hi;assistant:<f {shown}>;")] * 3


async def test_template_switches_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}"
    _, link = await chat(tmp_path, template, USER, chat_template_kwargs={"loud": True})
    assert list(link.requests[0].prompt_ids) == ids_of("hi!")


async def test_a_chat_that_renders_to_nothing_is_refused(tmp_path: Path) -> None:
    response, _ = await chat(tmp_path, "{% if false %}x{% endif %}", USER)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
