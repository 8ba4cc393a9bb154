"""A node's labels say what pools select by, and every one of them is what Ray takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from polypath.deployments.cli import app
from polypath.deployments.node_labels import as_option, label_value, node_labels
from polypath.runtime.planning.hardware import PROFILES, Cpu, Gpu, Hardware, Memory, Torch

NODE = Hardware(
    name="n",
    origin="probe",
    software="",
    cpu=Cpu(
        name="c",
        architecture="x86_64",
        cores_total=8,
        cores_usable=6,
        cores_origin="affinity",
        isa=("avx2", "fma", "f16c"),
    ),
    memory=Memory(total_bytes=(15 << 30) + 1, free_bytes=None, origin="host"),
    torch=Torch(version=None),
)
CARD = Gpu(index=0, name="NVIDIA L4 (24 GB)", total_bytes=24 << 30, compute_capability=(8, 9))


def test_a_node_without_a_card() -> None:
    expected = "device=cpu,arch=x86_64,isa=avx2,cores=6,memory-gib=15"
    assert as_option(node_labels(NODE)) == expected


def test_a_node_with_a_card_and_one_whose_card_is_broken() -> None:
    labels = node_labels(replace(NODE, gpus=(CARD,)))
    assert (labels["device"], labels["gpu"], labels["gpu-arch"]) == (
        "cuda",
        "NVIDIA-L4-24-GB",
        "sm89",
    )
    broken = replace(CARD, problem="the driver is too old")
    assert node_labels(replace(NODE, gpus=(broken,))) == node_labels(NODE)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "plain"),
        (("avx2",), "plain"),
        (("avx2", "fma", "f16c", "avx512f", "avx512bw"), "avx512"),
        (("avx512f", "avx512bw", "avx512_vnni", "amx_tile", "amx_bf16"), "amx"),
        (("asimd",), "neon"),
    ],
)
def test_the_best_instructions_name_the_isa(flags: tuple[str, ...], expected: str) -> None:
    cpu = replace(NODE.cpu, isa=flags)
    assert node_labels(replace(NODE, cpu=cpu))["isa"] == expected


def test_values_are_what_ray_takes() -> None:
    assert label_value("AMD EPYC 9B14 (Zen 4) @ 2.6 GHz!") == "AMD-EPYC-9B14-Zen-4-2.6-GHz"
    assert len(label_value("x" * 100)) == 63
    assert label_value("((") == ""


def test_ray_reads_the_labels_of_every_profile() -> None:
    utils = pytest.importorskip("ray._private.label_utils")
    files = sorted(PROFILES.glob("*.json"))
    assert files
    for file in files:
        labels = node_labels(Hardware.from_json(json.loads(file.read_text())))
        assert utils.parse_node_labels_string(as_option(labels)) == labels, file
        utils.validate_node_labels(labels)


def test_the_command_prints_them_alone() -> None:
    found = CliRunner().invoke(app, ["probe", "--ray-labels"])
    assert found.exit_code == 0
    (line,) = found.stdout.splitlines()
    names = [pair.split("=")[0] for pair in line.split(",")]
    assert names[:3] == ["device", "arch", "isa"]
    assert CliRunner().invoke(app, ["probe", "--ray-labels", "--json"]).exit_code == 2
