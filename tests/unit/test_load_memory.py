"""Memory while a model loads: the weights as they are stored, and little beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polypath.runtime.checkpoint.source import open_checkpoint
from polypath.runtime.checkpoint.tensor_check import expected_shapes
from polypath.runtime.planning.hardware import load_hardware
from polypath.runtime.planning.rules import native_variant
from polypath.tests import tiny_models

CHILD = '''
import json, sys
def most_resident():
    """Bytes; not ru_maxrss, which begins with what the parent had."""
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
from polypath.runtime.config import EngineConfig
from polypath.runtime.engine import Engine
from polypath.runtime.weights import stored_bytes
from polypath.runtime import startup
imported = most_resident()
engine = Engine.build(EngineConfig(**json.loads(sys.argv[1])))
weights = stored_bytes(engine.model.config, engine.model.weights)
peak = most_resident() - imported + IMPORTS
print(json.dumps([weights, engine.plan.kv_bytes, peak, engine.plan.linear_method]))
'''
MB = 10**6
IMPORTS = 235 * MB  # what interpreter and torch take where the bound was set
BESIDE = 300 * MB  # interpreter, torch, one tensor in the making
KV = {"kv_bytes": 64 * MB, "max_model_len": 128, "max_num_batched_tokens": 64}
native = pytest.mark.skipif(
    native_variant(load_hardware("this")) is None, reason="no build of the kernels fits this CPU"
)


def peak_of(model: Path, **options: Any) -> tuple[int, int, int, str]:
    """(bytes of weights, of the KV pool, peak of the process, linear method) of a fresh process."""
    config = {"model": str(model), **KV, **options}
    # How many pages of torch's libraries are resident depends on the file system, not on us.
    child = CHILD.replace("IMPORTS", str(IMPORTS))
    command = [sys.executable, "-c", child, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    weights, kv, peak, method = json.loads(done.stdout.splitlines()[-1])
    print(f"{method}: {weights / MB:.0f} MB of weights, peak {peak / MB:.0f} MB")
    return weights, kv, peak, method


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 291 million weights in bfloat16, 582 MB, in shards."""
    folder = tmp_path_factory.mktemp("large")
    config = {
        "intermediate_size": 2816,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 512,
    }
    vocab = tiny_models.vocabulary()
    tiny_models.write_folder(folder, hidden=1024, layers=20, rows=32000 - len(vocab), config=config)
    shapes = expected_shapes(open_checkpoint(str(folder), weights=False).config)
    generator = torch.Generator().manual_seed(0)
    names, shard = list(shapes), 0
    while names:
        taken, names = names[:40], names[40:]
        weights = {
            name: (torch.randn(*shapes[name], generator=generator) * shapes[name][-1] ** -0.5)
            .bfloat16()
            .contiguous()
            for name in taken
        }
        save_file(weights, str(folder / f"part-{shard}.safetensors"), metadata={"format": "pt"})
        shard += 1
    return folder


@native
@pytest.mark.slow
def test_the_default_model_loads_in_little_more_than_its_weights(default_model_path: Path) -> None:
    weights, kv, peak, method = peak_of(default_model_path)
    assert method == "int4_group"
    assert peak <= 1.3 * weights + kv + BESIDE


@native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "dense_native"),
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "int4"}, "int4_group"),
        ({"linear_method": "torch_int8"}, "torch_int8"),
    ],
)
def test_a_large_checkpoint_loads_without_a_copy_of_it(
    large: Path, options: dict[str, Any], method: str
) -> None:
    weights, kv, peak, found = peak_of(large, **options)
    assert found == method
    assert peak <= 1.3 * weights + kv + BESIDE


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_was_read_survives_that_the_file_is_given_back(kind: str, tmp_path: Path) -> None:
    tiny_models.random(tmp_path / "folder")
    path = tmp_path / "folder"
    if kind == "gguf":
        path = tmp_path / "twin.gguf"
        tiny_models.to_gguf(tmp_path / "folder", path, "Q8_0")
    checkpoint = open_checkpoint(str(path))
    held = checkpoint.read("lm_head.weight")
    before = held.clone()
    checkpoint.release()
    assert torch.equal(held, before) and torch.equal(checkpoint.read("lm_head.weight"), before)
