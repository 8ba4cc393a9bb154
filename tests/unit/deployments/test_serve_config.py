"""A serve.yaml that is wrong is refused with the line, the key, and the nearest known one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from polypath.deployments.fleet import deployment_name
from polypath.deployments.serve_config import fleet_from_args
from polypath.deployments.serve_schema import (
    ENGINE_HELP,
    NO_ENGINE_OPTION,
    ApiEntry,
    Entry,
    GatewayEntry,
    ModelEntry,
    PoolEntry,
    ScalingEntry,
    ServeEntry,
)
from polypath.runtime.config import EngineConfig
from polypath.runtime.errors import ConfigurationError
from polypath.tests.unit.deployments.serve_files import read

FLEET = """\
    host: 0.0.0.0
    port: 9000
    address: 10.0.0.1:6379
    gateway:
      num_cpus: 0.5
    api:
      max_body_bytes: 1000
      cors_origins: ["*"]
    models:
      - model: /models/qwen
        name: qwen
        engine: {max_model_len: 4096, max_num_seqs: 8}
        prefer: [h100, cpu]
        spill: false
        pools:
          - name: h100
            num_cpus: 4
            num_gpus: 1
            accelerator_type: H100
            min_workers: 2
            max_workers: 2
            engine: {dtype: bfloat16, max_num_seqs: 64}
          - name: cpu
            num_cpus: 2.5
            resources: {slots: 1}
            label_selector: {zone: "in(a,b)"}
            engine: {kv_bytes: 1GiB}
      - model: /models/smol
        name: org/smol
        pools: [{name: cpu}]
"""


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_a_whole_file_becomes_models_with_pools(tmp_path: Path) -> None:
    found = read(tmp_path, FLEET)
    assert (found.host, found.port, found.address) == ("0.0.0.0", 9000, "10.0.0.1:6379")
    qwen, smol = found.fleet.models
    h100, cpu = qwen.pools
    assert (h100.num_workers, h100.num_cpus, h100.num_gpus) == (2, 4.0, 1.0)
    assert h100.demand() == {"CPU": 4.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    assert cpu.label_selector == {"zone": "in(a,b)"} and cpu.demand()["slots"] == 1
    assert (qwen.rules.prefer, qwen.rules.spill) == (("h100", "cpu"), False)
    assert (smol.rules.prefer, smol.rules.spill) == ((), True)
    assert found.fleet.gateway_cpus == 0.5
    assert found.fleet.settings is not None
    assert found.fleet.settings.cors_origins == ("*",)
    names = [deployment_name(found.fleet, model, pool) for model, pool in found.fleet.pools()]
    assert names == ["qwen.h100", "qwen.cpu", "org-smol.cpu"]
    assert smol.pools[0].num_cpus is None


def test_a_pools_options_win_over_the_models(tmp_path: Path) -> None:
    h100, cpu = read(tmp_path, FLEET).fleet.models[0].pools
    assert (h100.engine.max_model_len, h100.engine.max_num_seqs) == (4096, 64)
    assert (cpu.engine.max_num_seqs, cpu.engine.kv_bytes) == (8, 2**30)


def test_a_pool_without_gpus_keeps_off_them_and_one_with_them_insists(tmp_path: Path) -> None:
    h100, cpu = read(tmp_path, FLEET).fleet.models[0].pools
    assert (h100.engine.device, cpu.engine.device) == ("cuda", "cpu")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("modles: []", 1, "modles is no key of the file; did you mean models?"),
        ("models: [{pools: [{name: a, num_gpu: 1}]}]", 1, "did you mean num_gpus?"),
        (
            "models:\n  - pools:\n      - name: a\n        engine:\n          page_sise: 8",
            5,
            "page_sise is no key of models[0].pools[0].engine; did you mean page_size?",
        ),
        ("models: [{pools: auto}]\napi: {max_body: 1}", 2, "did you mean max_body_bytes?"),
        ("models: [{pools: auto}]\nqqqq: 1", 2, "keys there are host, port"),
        ("models:\n  - name: a", 2, "models[0].pools is missing"),
        ("models: []", 1, "models is empty; it needs at least one item"),
        ("models: [{pools: []}]", 1, "models[0].pools is empty; it needs at least one"),
        ("models: [{pools: manual}]", 1, "models[0].pools is 'manual'; input should be 'auto'"),
        ("models: [{pools: auto}]\nport: high", 2, "port is 'high'; input should be a valid int"),
        ("models: [{pools: auto}]\nport: true", 2, "port is True; input should be a valid int"),
        ("[1]", 1, "the file must hold keys, such as key: value"),
        ("", None, "serve.yaml is empty"),
        ("models: [", 1, "no YAML"),
        ("models: [{pools: auto}]\nmodels: []", 2, "models was given in line 1 already"),
        ("models: &a [*a]", 1, "an alias that contains itself"),
        ("hello", 1, "the file must hold keys, such as key: value"),
        ("models: {a: b}", 1, "models must be a list"),
        ("models: [{pools: [a]}]", 1, "models[0].pools[0] must hold keys"),
        ("models: " + 1200 * "[", None, "serve.yaml nests too deeply"),
        ("models: [{pools: auto}]\nport: 70000", 2, "port is 70000; input should be less than"),
    ],
)
def test_a_wrong_key_or_type_is_named_with_its_line(
    tmp_path: Path, text: str, line: int | None, expected: str
) -> None:
    sentence = refused(tmp_path, text)
    assert expected in sentence
    assert line is None or sentence.startswith(f"serve.yaml, line {line}: ")


def pool(keys: str, model: str = "") -> str:
    return f"models: [{{name: m, {model} pools: [{{name: a, {keys}}}]}}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (pool("", "prefer: [b],"), "prefer[0] is 'b', which is no pool; pools are a"),
        (pool("", "prefer: [a, a],"), "prefer names a pool twice"),
        (pool("", "spill: false,"), "spill says nothing without prefer"),
        ("models: [{pools: auto, prefer: [a]}]", "with pools: auto there are none yet"),
        (pool("min_workers: 0"), "pools[0].min_workers is 0 without max_workers: the pool could"),
        (pool("price: 0"), "price"),
        (pool("cold_start_s: -1"), "cold_start_s"),
        (pool("min_workers: 3, max_workers: 1"), "max_workers is 1, less than min_workers 3"),
        (pool("num_gpus: 2"), "a worker runs on one GPU"),
        (pool("num_gpus: 0.5"), "num_gpus 0.5 shares a card, but memory_share is not given"),
        (pool("num_gpus: 0.5, engine: {memory_share: 0.9}"), "memory_share is 0.9; give"),
        (pool("num_cpus: 0"), "num_cpus is 0; input should be greater than 0"),
        (pool("num_cpus: .inf"), "num_cpus is inf; input should be a finite number"),
        (pool("price: .inf"), "price is inf; input should be a finite number"),
        (pool("min_workers: 1000000000000"), "input should be less than or equal to 10000"),
        (pool("max_workers: 1000000"), "input should be less than or equal to 10000"),
        (pool("", "name: 'a\tb',").replace("name: m,", ""), "characters that can be printed"),
        (pool("", "name: '',").replace("name: m,", ""), "1 to 200 characters that can be"),
        (pool("").replace("name: m", f"name: {'m' * 201}"), "1 to 200 characters that can be"),
        (f"{pool('')}\napi: {{refresh_s: -1}}", "api: refresh_s is -1; it must be 0 or more"),
        (f"{pool('')}\napi: {{silence_s: 0}}", "api: silence_s is 0; it must be above 0"),
        (f"{pool('')}\napi: {{stranded_s: .nan}}", "api.stranded_s is nan; input should be a fin"),
        (
            f"{pool('')}\nauth: {{keys: [{{name: k, hash: pp-abc}}]}}",
            "auth.keys[0].hash is '(left out)'; it must be a SHA-256 in hex, 64 of 0-9a-f; make",
        ),
        (pool("num_cpus: -1"), "num_cpus is -1; input should be greater than 0"),
        (pool("resources: {GPU: 1}"), "resources.GPU is no custom resource"),
        (
            pool("label_selector: {zone: yes}"),
            "zone is True; input should be a valid string (quote",
        ),
        (pool("label_selector: {zone: 'a b'}"), "'a b' is no label selector; write x, !x, in(x,y)"),
        (pool("label_selector: {'a b': x}"), "'a b' is no name of a label"),
        (pool("engine: {page_size: 17}"), "pools[0].engine: page_size is 17; it must be a power"),
        (pool("engine: {runner: egaer}"), "runner 'egaer' is unknown; it is one of auto,"),
        (pool("engine: {kv_bytes: 1XB}"), "kv_bytes is '1XB'; it must be bytes, or a size such as"),
        (pool("num_gpus: 1, engine: {device: cpu}"), "device is cpu, but num_gpus is 1"),
        (pool("engine: {device: cuda}"), "device is cuda, but num_gpus is 0"),
        (
            pool("num_cpus: 1.5, engine: {num_threads: 3}"),
            "num_threads 3 is more than num_cpus 1.5",
        ),
        (
            pool("", "engine: {max_num_seqs: 0},"),
            "engine: max_num_seqs is 0; it must be at least 1",
        ),
        ("models: [{pools: [{name: 'a b'}]}]", "pools[0].name is 'a b'; letters, digits"),
        ("models: [{pools: [{name: a}, {name: a}]}]", "two pools of a model are named a"),
        (
            "models: [{name: m, pools: [{name: a}]}, {name: m, pools: [{name: a}]}]",
            "two models are named m",
        ),
        ("models: [{name: m, pools: auto}, {pools: [{name: a}]}]", "takes all nodes for one model"),
        ("models: [{pools: auto}]\napi: {max_choices: 0}", "api: max_choices is 0; it must be at"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    sentence = refused(tmp_path, text)
    assert expected in sentence
    assert "\n" not in sentence


def test_every_fault_has_its_own_line_and_many_are_counted(tmp_path: Path) -> None:
    pools = "\n".join(f"      - {{name: p, key{n}: 1}}" for n in range(12))
    lines = refused(tmp_path, f"models:\n  - pools:\n{pools}").splitlines()
    assert [line.partition(":")[0] for line in lines[:8]] == [
        f"serve.yaml, line {n}" for n in range(3, 11)
    ]
    assert lines[8] == "and 4 more"


def test_rays_own_file_gives_the_same_keys_without_where_to_listen() -> None:
    args = {"models": [{"model": "/m", "pools": [{"name": "a"}]}]}
    assert fleet_from_args(args).models[0].pools[0].name == "a"
    with pytest.raises(ConfigurationError, match=r"args\.port has no place here: .*http_options"):
        fleet_from_args(args | {"port": 1})
    with pytest.raises(ConfigurationError, match=r"^args: modles is no key"):
        fleet_from_args({"modles": []})


def test_every_key_is_documented() -> None:
    entries: tuple[type[Entry], ...] = (
        ServeEntry,
        ModelEntry,
        ScalingEntry,
        PoolEntry,
        GatewayEntry,
        ApiEntry,
    )
    for entry in entries:
        silent = [name for name, field in entry.model_fields.items() if not field.description]
        assert not silent, entry
    options = {option.name for option in fields(EngineConfig)} - set(NO_ENGINE_OPTION)
    assert set(ENGINE_HELP) == options


def test_a_pool_that_is_scaled_carries_its_rules(tmp_path: Path) -> None:
    text = """\
        models:
          - model: /m
            name: m
            scaling: {target_queue_s: 2.5, scale_down_delay_s: 30, max_utilization: 0.5}
            pools:
              - {name: a, min_workers: 0, max_workers: 3, price: 0.5, cold_start_s: 20}
              - {name: b, min_workers: 2}
    """
    (model,) = read(tmp_path, text).fleet.models
    assert (model.scaling.target_queue_s, model.scaling.scale_down_delay_s) == (2.5, 30)
    a, b = (pool.scaling_rules() for pool in model.pools)
    assert (a.min_workers, a.max_workers, a.price, a.cold_start_s) == (0, 3, 0.5, 20)
    assert (b.min_workers, b.max_workers, b.price) == (2, 2, 1.0)
    assert [pool.is_elastic for pool in model.pools] == [True, False]
