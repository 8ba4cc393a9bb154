"""Kernels compiled for cards that are not here, by Triton's own compiler: they keep everything in
registers, load 16 bytes at a time, and prefill multiplies on tensor cores.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton's compiler is for Linux on x86_64")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from polypath.kernels.triton import (  # noqa: E402
    argmax,
    decode_attention,
    prefill_attention,
    rms_norm,
    rope_store,
    silu_mul,
)
from polypath.kernels.triton.tiles import decode_tile, prefill_tile  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSOR_CORES = r"\b(HMMA|HGMMA|UTCHMMA)\b"
SHARED_BYTES = {(7, 5): 64, (8, 0): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB
"""Shared memory of a program; for 8.0 that of 8.6 and 8.9, which run the same tiles."""

BITS_16, BITS_32 = ("bf16", "fp16"), "fp32"


@dataclass(frozen=True, slots=True)
class Binary:
    """What came out for one card."""

    card: tuple[int, int]
    ptx: str
    sass: str
    shared_bytes: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes a thread, into registers or straight into shared memory."""
        return len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*0x10,", self.ptx))


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles anew, and leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compile_for(
    card: tuple[int, int],
    kernel: Any,  # a kernel has no type of its own
    kinds: dict[str, str],
    constants: dict[str, int],
    tmp_path: Path,
    **options: int,
) -> Binary:
    """`kinds` of arguments that are not constants: pointers and strides are multiples of 16, as a
    launch finds them, but for those that the kernel does not specialise.
    """
    names: list[str] = kernel.arg_names
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    missing = {n for n, kind in signature.items() if kind == "constexpr"} ^ constants.keys()
    assert not missing, f"{kernel.__name__}: {missing}"
    whole = [n for n, k in kinds.items() if (k[0] == "*" or k == "i32") and n not in plain]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    target = GPUTarget("cuda", card[0] * 10 + card[1], 32)
    built = triton.compile(source, target=target, options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    command = [str(TOOLS / "nvdisasm"), "-c", str(cubin)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Binary(card, built.asm["ptx"], sass, built.metadata.shared)


def check_resources(binary: Binary) -> None:
    """It fits a multiprocessor without spilling to local memory, and reads 16 bytes at a time."""
    assert binary.shared_bytes <= SHARED_BYTES[binary.card] << 10
    assert binary.count(r"\b(LDL|STL)\b") == 0
    assert binary.wide_loads > 0


ATTENTION_KINDS = {
    **dict.fromkeys(("page_table_ptr", "query_starts_ptr", "kv_lens_ptr"), "*i32"),
    **dict.fromkeys(("q_stride", "page_stride"), "i32"),
    **dict.fromkeys(("inner", "sharpness"), "fp32"),
}


def shape(group: int, head_dim: int, page_size: int, window: int, soft_cap: bool) -> dict[str, int]:
    return {
        "num_heads": 8 * group,
        "kv_heads": 8,
        "head_dim": head_dim,
        "padded_dim": 1 << (head_dim - 1).bit_length(),
        "page_size": page_size,
        "window": window,
        "has_cap": soft_cap,
    }


def compile_decode(
    card: tuple[int, int],
    dtype: str,
    tmp_path: Path,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 16,
    window: int = 0,
    soft_cap: bool = False,
) -> Binary:
    constants = shape(group, head_dim, page_size, window, soft_cap)
    tile = decode_tile(group, constants["padded_dim"], 4 if dtype == BITS_32 else 2, card)
    split, most = decode_attention.SPLIT, decode_attention.MOST_SPLITS
    constants |= {"height": tile.height, "width": tile.width, "split": split, "most": most}
    kinds = ATTENTION_KINDS | dict.fromkeys(("q_ptr", "kv_ptr"), f"*{dtype}")
    kinds |= {"acc_ptr": "*fp32", "sums_ptr": "*fp32", "num_slots": "i32"}
    return compile_for(
        card,
        decode_attention._attend_splits,
        kinds,
        constants,
        tmp_path,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def compile_prefill(
    card: tuple[int, int],
    dtype: str,
    tmp_path: Path,
    group: int = 4,
    head_dim: int = 128,
    page_size: int = 16,
    window: int = 0,
    soft_cap: bool = False,
) -> Binary:
    constants = shape(group, head_dim, page_size, window, soft_cap)
    tile = prefill_tile(constants["padded_dim"], 4 if dtype == BITS_32 else 2, card)
    constants |= {"height": tile.height, "width": tile.width}
    kinds = ATTENTION_KINDS | dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), f"*{dtype}")
    return compile_for(
        card,
        prefill_attention._attend_blocks,
        kinds | {"num_rows": "i32"},
        constants,
        tmp_path,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def test_prefill_on_hopper_uses_its_own_tensor_core_instruction(tmp_path: Path) -> None:
    binary = compile_prefill((9, 0), "bf16", tmp_path)
    check_resources(binary)
    assert binary.count(r"\bHGMMA\b") > 0


@pytest.mark.slow
def test_decode_on_hopper_uses_tensor_cores(tmp_path: Path) -> None:
    binary = compile_decode((9, 0), "bf16", tmp_path)
    check_resources(binary)
    assert binary.count(TENSOR_CORES) > 0


ODD = {"group": 7, "window": 4096, "soft_cap": True, "page_size": 128}
ATTENTION: list[tuple[tuple[int, int], str, dict[str, int]]] = [
    ((7, 5), "fp16", {"head_dim": 64}),
    ((7, 5), "fp16", {"head_dim": 128} | ODD),
    ((7, 5), "fp32", {"head_dim": 128}),
    ((8, 0), "bf16", {"head_dim": 64, "group": 1}),
    ((8, 0), "fp16", {"head_dim": 256}),
    ((8, 0), "fp32", {"head_dim": 96}),
    ((9, 0), "bf16", {"head_dim": 80} | ODD),
    ((9, 0), "fp16", {"head_dim": 256, "group": 16}),
    ((9, 0), "fp32", {"head_dim": 256}),
    ((9, 0), "fp32", {"head_dim": 128, "group": 1}),
    ((10, 0), "bf16", {"head_dim": 128}),
    ((12, 0), "bf16", {"head_dim": 128}),
]


@pytest.mark.slow
@pytest.mark.parametrize("build", [compile_decode, compile_prefill])
@pytest.mark.parametrize(("card", "dtype", "sizes"), ATTENTION, ids=str)
def test_attention_for_every_card(
    card: tuple[int, int], dtype: str, sizes: dict[str, int], build: Any, tmp_path: Path
) -> None:
    binary = build(card, dtype, tmp_path, **sizes)
    check_resources(binary)
    has_tensor_cores = card >= (8, 0) and dtype in BITS_16  # that Triton knows
    assert (binary.count(TENSOR_CORES) > 0) == has_tensor_cores


ROW_KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "rms_norm": (
        rms_norm._rms_norm,
        {"x_ptr": "*T", "weight_ptr": "*T", "out_ptr": "*T", "x_stride": "i32", "eps": "fp32"},
        {"size": 4096, "block": 4096},
    ),
    "add_rms_norm": (
        rms_norm._add_rms_norm,
        dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"), "*T")
        | {"x_stride": "i32", "residual_stride": "i32", "eps": "fp32"},
        {"size": 4096, "block": 4096},
    ),
    "merge_splits": (
        decode_attention._merge_splits,
        {"acc_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*T", "sharpness": "fp32"}
        | {"query_starts_ptr": "*i32", "kv_lens_ptr": "*i32", "num_slots": "i32"},
        {"num_heads": 32, "head_dim": 128, "padded_dim": 128, "window": 0, "width": 64}
        | {"split": decode_attention.SPLIT, "most": decode_attention.MOST_SPLITS}
        | {"chunk": decode_attention.CHUNK},
    ),
    "silu_mul": (
        silu_mul._silu_mul,
        {"gate_up_ptr": "*T", "out_ptr": "*T", "row_stride": "i32"},
        {"size": 14336, "block": silu_mul.BLOCK},
    ),
    "argmax": (
        argmax._largest_of_part,
        {"x_ptr": "*fp32", "found_ptr": "*i64", "x_stride": "i32", "size": "i32"}
        | {"num_parts": "i32"},
        {"block": argmax.BLOCK},
    ),
    "rope_store": (
        rope_store._rope_store,
        dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "kv_ptr", "q_out_ptr"), "*T")
        | {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64"}
        | {"qkv_stride": "i32", "eps": "fp32"},
        {"num_heads": 32, "kv_heads": 8, "head_dim": 128, "half": 64, "page_size": 16}
        | {"has_norms": True, "heads": rope_store.HEADS},
    ),
}
ROW_WARPS = {
    **{"rms_norm": 8, "add_rms_norm": 8, "merge_splits": 4},
    **{"silu_mul": 4, "argmax": 8, "rope_store": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_KERNELS)
@pytest.mark.parametrize(
    ("card", "dtype"), [((7, 5), "fp16"), ((8, 0), "fp32"), ((9, 0), "bf16")], ids=str
)
def test_kernels_over_rows_for_every_card(
    card: tuple[int, int], dtype: str, name: str, tmp_path: Path
) -> None:
    kernel, kinds, constants = ROW_KERNELS[name]
    kinds = {key: kind.replace("T", dtype) for key, kind in kinds.items()}
    check_resources(
        compile_for(card, kernel, kinds, constants, tmp_path, num_warps=ROW_WARPS[name])
    )
