"""A server with keys and HTTPS: who gets in, what listens, and what stands in the logs."""

from __future__ import annotations

import re
import ssl
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest

from polypath.deployments.keys import hash_key
from polypath.tests.certificates import self_signed
from polypath.tests.ray.running_server import RunningServer, run, serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DOC = Path(__file__).resolve().parents[2] / "docs" / "security.md"
USER, BOSS, WRONG = "pp-MARKEDUSERKEY", "pp-MARKEDBOSSKEY", "pp-MARKEDWRONGKEY"
PROMPT = "MARKEDPROMPT"
CONFIG = """\
models:
  - model: {model}
    name: tiny
    engine: {{max_num_seqs: 4}}
    pools: [{{name: cpu, num_cpus: 1}}]
auth:
  keys:
    - {{name: user, hash: {hash}, tokens_per_minute: 20000}}
"""


class SecureServer:
    """The running server, and clients of it."""

    def __init__(self, running: RunningServer, cert: Path) -> None:
        self.running = running
        self.trust = ssl.create_default_context(cafile=str(cert))
        self.http = httpx.Client(
            base_url=running.url, verify=self.trust, trust_env=False, timeout=60
        )

    def get(self, path: str, key: str) -> int:
        return self.http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code


@pytest.fixture(scope="module")
def secure(
    no_server: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureServer]:
    folder = tmp_path_factory.mktemp("secure")
    cert, key = self_signed(folder)
    config = folder / "serve.yaml"
    config.write_text(CONFIG.format(model=tiny_model, hash=hash_key(USER)))
    arguments = ["--config", str(config), "--port", "0"]
    arguments += ["--tls-cert", str(cert), "--tls-key", str(key)]
    with serving(arguments, POLYPATH_ADMIN_KEYS=hash_key(BOSS)) as running:
        server = SecureServer(running, cert)
        yield server
        server.http.close()


def test_it_says_https_and_speaks_nothing_else(secure: SecureServer) -> None:
    assert secure.running.url.startswith("https://127.0.0.1:")
    with pytest.raises(httpx.HTTPError):
        httpx.get(secure.running.url.replace("https", "http"), trust_env=False, timeout=10)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(secure.running.url, trust_env=False, timeout=10)


def test_each_key_gets_what_it_may(secure: SecureServer) -> None:
    assert secure.http.get("/health").status_code == 200
    assert secure.http.get("/v1/models").status_code == 401
    paths = ("/v1/models", "/metrics", "/v1/paths", "/admin/limits")
    assert [secure.get(path, WRONG) for path in paths] == [401, 401, 401, 401]
    assert [secure.get(path, USER) for path in paths] == [200, 403, 403, 403]
    assert [secure.get(path, BOSS) for path in paths] == [200, 200, 200, 200]


def test_a_stream_arrives_over_https_and_a_late_one_ends(secure: SecureServer) -> None:
    http = openai.DefaultHttpxClient(verify=secure.trust, trust_env=False)
    with openai.OpenAI(
        base_url=f"{secure.running.url}/v1", api_key=USER, max_retries=0, http_client=http
    ) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=8,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert len(list(stream)) >= 8
        with pytest.raises(openai.APIStatusError) as late:
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=7000,
                extra_body={"ignore_eos": True},
                extra_headers={"X-Request-Timeout": "0.3"},
            )
    assert late.value.status_code == 504
    assert late.value.code == "deadline_exceeded"


def test_every_listening_socket_is_documented(secure: SecureServer) -> None:
    secure.running.look()
    found: set[tuple[str, str]] = set()
    for process in [psutil.Process(secure.running.process.pid), *secure.running.family]:
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                address = connection.laddr[0].removeprefix("::ffff:")
                where = "loopback" if address in ("127.0.0.1", "::1") else "all"
                found.add((process_name(process), where))
    assert found == documented()


def process_name(process: psutil.Process) -> str:
    """The first of the documented names that its command line holds."""
    command = " ".join(process.cmdline())
    names = sorted({name for name, _ in documented()}, key=len, reverse=True)
    return next((n for n in names if any(w in command for w in n.split(" or "))), command[:80])


def documented() -> set[tuple[str, str]]:
    """Process and address of each row of the table."""
    text = DOC.read_text().split("## Every socket")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (loopback|all)[^|]*\|", text, re.M)
    assert len(rows) > 8
    return set(rows)


def test_rays_http_asks_for_the_token(secure: SecureServer) -> None:
    """It takes jobs, which are any code."""
    asked = 0
    for process in secure.running.look():
        if not re.search("DashboardAgent|RuntimeEnvAgent", " ".join(process.cmdline())):
            continue
        for connection in process.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            url = f"http://127.0.0.1:{connection.laddr[1]}/api/job_agent/jobs/"
            try:
                answer = httpx.post(url, json={"entrypoint": "true"}, trust_env=False, timeout=3)
            except httpx.HTTPError:
                continue  # gRPC
            asked += 1
            # Prometheus text is all that comes without it.
            assert answer.status_code in (401, 403, 404, 405) or "# HELP" in answer.text[:200]
            assert not answer.is_success or "# HELP" in answer.text[:200]
    assert asked >= 2


def test_no_port_obeys_who_has_no_token(secure: SecureServer) -> None:
    """Whatever listens, of us or of Ray: gRPC refuses, with a wrong token too, the gateway wants
    its key, and what is left is text to read.
    """
    kinds: Counter[str] = Counter()
    for process in [psutil.Process(secure.running.process.pid), *secure.running.look()]:
        for port in ports_of(process):
            kinds[knock(process, port)] += 1
    assert kinds["a key is asked for"] == 1 and kinds["a token is asked for"] > 8, kinds


def ports_of(process: psutil.Process) -> set[int]:
    """Empty for one that has ended: Ray's idle processes come and go."""
    try:
        found = process.net_connections(kind="tcp")
    except psutil.Error:
        return set()
    return {each.laddr[1] for each in found if each.status == psutil.CONN_LISTEN}


def knock(process: psutil.Process, port: int) -> str:
    """What a stranger gets there; again for a while where it is nothing to be content with, since a
    process may just have begun.
    """
    deadline = time.monotonic() + 10
    while not (kind := what_a_stranger_gets(port)):
        if port not in ports_of(process):
            return "gone"
        assert time.monotonic() < deadline, (process_name(process), process.cmdline(), port)
        time.sleep(0.5)
    return kind


CALLS = (  # of each of Ray's services one, empty
    "/ray.rpc.CoreWorkerService/GetObjectStatus",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.serve.ASGIService/HandleRequest",
)


def what_a_stranger_gets(port: int) -> str:
    """One of three answers; empty when it is none of them."""
    codes = {grpc_code(port, call, token) for call in CALLS for token in (None, "0" * 64)}
    assert "OK" not in codes, (port, codes)
    if "UNAUTHENTICATED" in codes:
        return "a token is asked for"
    for scheme in ("https", "http"):
        try:
            url = f"{scheme}://127.0.0.1:{port}/"
            answer = httpx.get(url, verify=False, trust_env=False, timeout=3)
        except httpx.HTTPError:
            continue
        if answer.status_code == 401:
            is_ours = "You didn't provide an API key" in answer.text
            return "a key is asked for" if is_ours else "a token is asked for"
        metrics = httpx.get(f"{url}metrics", verify=False, trust_env=False, timeout=3)
        return "text to read" if "# HELP" in metrics.text else ""
    return ""


def grpc_code(port: int, call: str, token: str | None) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", timeout=3, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
    return "OK"


def test_nobody_else_may_enter_rays_folder(secure: SecureServer) -> None:
    """Ray opens its own folder and sockets to all; ours around it is closed."""
    inner = session_folder(secure).parent
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700
    assert inner.parent.name.startswith("polypath-")


def test_no_key_and_no_prompt_stands_in_any_file_or_argument(secure: SecureServer) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    wrong = [chat | {"n": PROMPT}, chat | {PROMPT: 1}, chat | {"model": PROMPT}]
    wrong.append({"model": "tiny", "prompt": PROMPT})
    statuses: set[int] = set()
    for key in (USER, WRONG):
        for body in (chat, *wrong):
            answer = secure.http.post(
                "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            statuses.add(answer.status_code)
    assert statuses == {200, 400, 401, 404}
    files = [path for path in session_folder(secure).parent.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        for mark in (b"MARKED", hash_key(USER).encode(), hash_key(BOSS).encode()):
            assert mark not in content, path
    assert "MARKED" not in secure.running.output
    for process in secure.running.look():
        assert "MARKED" not in " ".join(process.cmdline())


def session_folder(secure: SecureServer) -> Path:
    """Ray's folder of this run."""
    lines = [" ".join(process.cmdline()) for process in secure.running.look()]
    found = next(filter(None, (re.search(r"--session[-_]dir=(\S+)", line) for line in lines)))
    return Path(found[1])


@pytest.mark.parametrize("broken", ["missing", "of another", "expired"])
def test_a_bad_certificate_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path, broken: str
) -> None:
    cert, key = self_signed(tmp_path, days=(-9, -1) if broken == "expired" else (-1, 1))
    if broken == "missing":
        cert = tmp_path / "no.crt"
    if broken == "of another":
        _, key = self_signed(tmp_path, name="other")
    arguments = ["--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    code, output = run(["serve", str(tiny_model), *arguments])
    assert code == 2
    assert output.startswith("error: ")
    assert output.count("\n") == 1
