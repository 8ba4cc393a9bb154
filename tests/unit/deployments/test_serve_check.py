"""What `polypath serve` finds out before it starts anything, and how fast."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polypath.deployments.cli import app
from polypath.deployments.config import ServeConfig
from polypath.deployments.fleet import plain_fleet
from polypath.deployments.nodes import Node
from polypath.deployments.serve_check import check_cluster, check_offline, check_own_ray
from polypath.deployments.serve_preparation import ServeRequest, absolute
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import ConfigurationError, PlanError
from polypath.runtime.planning.probe import probe
from polypath.tests.tiny_models import random
from polypath.tests.unit.deployments.serve_files import node, read, write

LIMIT_S = 5.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random(folder)
    return folder


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a", {"CPU": 4}, {"pool": "x"}), node("b", {"CPU": 8}, {"pool": "y"})]


def text(model: object, pools: str = "[{name: p, num_cpus: 1}]", more: str = "") -> str:
    return f"models: [{{model: {str(model)!r}, pools: {pools}, {more}}}]"


def test_an_own_ray_is_checked_to_the_plan_of_every_pool(tmp_path: Path, tiny: Path) -> None:
    pools = "[{name: p, num_cpus: 1}, {name: q, num_cpus: 0.5, engine: {max_num_seqs: 3}}]"
    checked = check_own_ray(read(tmp_path, text(tiny, pools)).fleet)
    threads = [(found.pool.name, found.plan.num_threads) for found in checked.planned]
    assert threads == [("p", 1), ("q", 1)]
    assert [pool.max_running for _, pool in checked.fleet.pools()] == [32 + 256, 3 + 256]
    assert (checked.fleet.models[0].name, checked.not_checked) == ("tiny", ())
    assert checked.fleet.models[0].pools[0].engine.served_model_name == "tiny"
    assert checked.fleet.gateway_cpus == 0, "our own Ray counts for us alone"


def test_on_an_own_ray_auto_is_one_worker_with_every_core(tmp_path: Path, tiny: Path) -> None:
    checked = check_own_ray(read(tmp_path, text(tiny, "auto")).fleet)
    ((_, pool),) = checked.fleet.pools()
    cores = probe().cpu.cores_usable
    assert (pool.num_workers, pool.num_cpus, checked.num_cpus) == (1, cores, cores)
    assert checked.planned[0].plan.num_threads == cores


def test_a_plan_that_cannot_work_here_names_pool_and_line(tmp_path: Path, tiny: Path) -> None:
    file = text(tiny, "[{name: p, num_cpus: 1, engine: {max_model_len: 999999}}]")
    expected = r"serve\.yaml, line 1: pool p cannot run on this machine: .*999999"
    with pytest.raises(PlanError, match=expected) as caught:
        check_own_ray(read(tmp_path, file).fleet)
    assert caught.value.refusals


def test_more_cpus_than_this_machine_has_are_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigurationError, match="a worker takes 999 CPUs, and no node that"):
        check_own_ray(read(tmp_path, text(tiny, "[{name: p, num_cpus: 999}]")).fleet)


def test_workers_that_share_this_machine_must_fit_its_memory_together(
    tmp_path: Path, tiny: Path
) -> None:
    free = probe().memory.free_bytes
    assert free is not None, "the probe knows this machine's memory"
    entry = f"num_cpus: 0.5, engine: {{kv_bytes: {free * 3 // 10}}}"
    check_own_ray(read(tmp_path, text(tiny, f"[{{name: p, {entry}}}]")).fleet)
    both = f"[{{name: p, {entry}}}, {{name: q, {entry}}}]"
    with pytest.raises(ConfigurationError, match=r"2 workers on this machine may take .* together"):
        check_own_ray(read(tmp_path, text(tiny, both)).fleet)


def test_a_missing_model_is_said_with_its_line_where_it_must_be_here(
    tmp_path: Path, nodes: list[Node]
) -> None:
    fleet = read(tmp_path, text("/no/such.folder")).fleet
    with pytest.raises(ConfigurationError, match=r"line 1: /no/such\.folder is no folder"):
        check_own_ray(fleet)
    with pytest.raises(ConfigurationError, match="is no folder"):
        check_cluster(fleet, nodes, is_head_here=True)
    far = check_cluster(fleet, nodes, is_head_here=False)
    assert far.fleet.models[0].name == "such"
    assert "the files of such, on nodes of the cluster" in far.not_checked[0]


def test_two_models_that_only_their_folders_name_alike_are_seen(tmp_path: Path, tiny: Path) -> None:
    one = f"{{model: {str(tiny)!r}, pools: [{{name: p, num_cpus: 0.5}}]}}"
    fleet = read(tmp_path, f"models: [{one}, {one}]").fleet
    with pytest.raises(ConfigurationError, match="two models are named tiny; give them a name"):
        check_own_ray(fleet)


def test_a_pool_that_can_only_run_on_this_machine_is_planned_too(
    tmp_path: Path, tiny: Path, nodes: list[Node]
) -> None:
    nodes[0] = replace(nodes[0], is_here=True)
    pools = "[{name: p, label_selector: {pool: x}}, {name: q, label_selector: {pool: y}}]"
    checked = check_cluster(read(tmp_path, text(tiny, pools)).fleet, nodes, is_head_here=True)
    assert [found.pool.name for found in checked.planned] == ["p"]
    assert "the plans of pool q" in checked.not_checked[0]
    long = pools.replace("{pool: x}", "{pool: x}, engine: {max_model_len: 999999}")
    with pytest.raises(PlanError, match="pool p cannot run on this machine"):
        check_cluster(read(tmp_path, text(tiny, long)).fleet, nodes, is_head_here=True)


def test_plans_of_other_machines_are_left_to_them(
    tmp_path: Path, tiny: Path, nodes: list[Node]
) -> None:
    pools = "[{name: p, label_selector: {pool: x}}, {name: q, label_selector: {pool: y}}]"
    checked = check_cluster(read(tmp_path, text(tiny, pools)).fleet, nodes, is_head_here=True)
    assert "the plans of pool p, pool q" in checked.not_checked[0] and not checked.planned
    assert [pool.num_cpus for _, pool in checked.fleet.pools()] == [3.75, 7.75]


def test_offline_says_what_it_did_not_look_at(tmp_path: Path, tiny: Path) -> None:
    checked = check_offline(read(tmp_path, text(tiny)).fleet, "nobody answers")
    assert checked.not_checked == (
        "whether the nodes for pool p exist, and how they would run: nobody answers",
    )


@pytest.mark.parametrize(
    ("address", "is_here"),
    [("auto", True), ("127.0.0.1:6379", True), ("[::1]:6379", True), ("10.255.1.2:6379", False)],
)
def test_a_head_on_this_machine_is_known_by_its_address(address: str, is_here: bool) -> None:
    fleet = plain_fleet(EngineConfig(model="m"))
    request = ServeRequest(fleet=fleet, where=ServeConfig(address=address))
    assert request.is_head_here is is_here


def test_paths_do_not_depend_on_the_working_directory(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    file = read(tmp_path, text("tiny", "[{name: p}]"))
    (model,) = absolute(file.fleet).models
    assert {model.model, model.engine.model, model.pools[0].engine.model} == {str(tiny)}
    assert absolute(plain_fleet(EngineConfig(model="org/name"))).models[0].model == "org/name"


@pytest.mark.parametrize("said", ["own.jinja", "{{ messages }}"])
def test_a_template_is_found_from_any_working_directory(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """The gateway has another one than the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    file = read(tmp_path, text(tiny, more=f"chat_template: '{said}'"))
    (model,) = absolute(file.fleet).models
    expected = said if "{" in said else str(tmp_path / said)
    assert model.chat_template == model.pools[0].engine.chat_template == expected


def serve(*arguments: object) -> Result:
    began = time.monotonic()
    result = CliRunner().invoke(app, ["serve", "--check", "--port", "0", *map(str, arguments)])
    assert time.monotonic() - began < LIMIT_S
    return result


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("modles: []", "modles is no key of the file; did you mean models?"),
        (text("/m", "[{name: p}, {name: p}]"), "two pools of a model are named p"),
        (text("/m", "[{name: p, engine: {dtype: float8}}]"), "dtype 'float8' is unknown"),
        (text("/no/model"), "/no/model is no folder and no file"),
        (text("", "[{name: p, num_cpus: 99999}]"), "a worker takes 99999 CPUs"),
        (text("", "[{name: p, num_gpus: 1}]"), "no node that fits has a GPU"),
        (text("", more="chat_template: /no/such.jinja"), "/no/such.jinja cannot be read as a"),
        (text("", more="chat_template: '{% for x in %}'"), "does not compile"),
        (
            text("", more="name: tiny")
            + f"\nauth: {{keys: [{{name: k, hash: '{64 * 'a'}', models: [tinny]}}]}}",
            "auth: the key k may use 'tinny', which is not served; did you mean tiny?",
        ),
        ("address: hello world\n" + text(""), "address is 'hello world'; give HOST:PORT, auto"),
        ("address: http://head:6379\n" + text(""), "give HOST:PORT, auto"),
    ],
)
def test_each_fault_ends_the_command_in_one_clear_line(
    tmp_path: Path, file: str, expected: str
) -> None:
    result = serve("--config", write(tmp_path, file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr.replace("\n", " ") and "Traceback" not in result.stderr


def test_a_taken_port_is_a_fault(tmp_path: Path, tiny: Path, taken: int) -> None:
    result = serve("--config", write(tmp_path, text(tiny)), "--port", taken)
    assert result.exit_code == 2 and f"127.0.0.1:{taken} is taken by" in result.stderr


def test_a_good_file_says_what_was_found(tmp_path: Path, tiny: Path) -> None:
    result = serve("--config", write(tmp_path, text(tiny)))
    assert result.exit_code == 0, result.stderr
    assert "pool p: 1 workers, each takes 1 CPUs" in result.stdout
    assert "planned here:" in result.stdout and "nothing was started" in result.stdout


def test_the_command_line_alone_is_checked_too(tiny: Path) -> None:
    result = serve(tiny, "--max-num-seqs", "2")
    assert result.exit_code == 0 and "planned here:" in result.stdout
    assert serve(tiny, "--max-model-len", "999999").exit_code == 2


def test_a_cluster_that_is_not_named_or_does_not_answer_is_no_fault(
    tmp_path: Path, tiny: Path
) -> None:
    file = write(tmp_path, text(tiny, "[{name: p, label_selector: {pool: x}}]"))
    for arguments in ((), ("--address", "127.0.0.1:1")):
        result = serve("--config", file, *arguments)
        assert result.exit_code == 0, result.stderr
        assert "Not checked: whether the nodes for pool p exist" in result.stdout


def test_a_launchers_file_stands_for_its_nodes(tmp_path: Path, tiny: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    pools = "[{name: p, label_selector: {pool: cpu}, min_workers: 2}]"
    result = serve(
        "--config", write(tmp_path, text(tiny, pools)), "--cluster", root / "cluster.yaml"
    )
    assert result.exit_code == 0 and "2 workers, each takes 15.75 CPUs" in result.stdout
    wrong = write(tmp_path, text(tiny, "[{name: p, label_selector: {pool: cpuu}}]"))
    result = serve("--config", wrong, "--cluster", root / "cluster.yaml")
    assert result.exit_code == 2 and "did you mean cpu?" in result.stderr.replace("\n", " ")


def test_nothing_given_beside_a_file_is_lost_in_silence(tmp_path: Path, tiny: Path) -> None:
    file = write(tmp_path, text(tiny))
    result = serve("--config", file, tiny, "--dtype", "float32", "--no-prefix-cache")
    assert result.exit_code == 2
    assert "MODEL, --dtype, --no-prefix-cache cannot stand beside --config" in result.stderr
