"""Programs: kernel calls noted once and run again natively, over as many rows as are live."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polypath.kernels.cpu import ops
from polypath.kernels.cpu.library import ROWS_ARGUMENT, Library, argument_types
from polypath.kernels.cpu.program import Program


def note_norm(
    library: Library, x: torch.Tensor, weight: torch.Tensor
) -> tuple[Program, torch.Tensor]:
    program = Program(library)
    with library.recording(program.add):
        out = ops.rms_norm(library, x, weight, 1e-5)
    return program, out


def test_noting_computes_nothing_and_running_does(library: Library) -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    program, out = note_norm(library, x, weight)
    out.fill_(7.0)
    program.run(0, len(program), 4)
    assert torch.equal(out, ops.rms_norm(library, x, weight, 1e-5))


def test_another_thread_computes_while_this_one_notes(library: Library) -> None:
    """A second engine of the process may be at work while the first one's graphs are captured."""
    x, weight = torch.randn(4, 32), torch.randn(32)
    expected = ops.rms_norm(library, x, weight, 1e-5)
    noted: list[str] = []
    with (
        library.recording(lambda name, arguments: noted.append(name)),
        ThreadPoolExecutor(1) as other,
    ):
        found = other.submit(ops.rms_norm, library, x, weight, 1e-5).result()
    assert torch.equal(found, expected)
    assert not noted


def test_a_run_reads_its_inputs_anew_and_touches_only_live_rows(library: Library) -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    program, out = note_norm(library, x, weight)
    x.copy_(torch.randn(4, 32))
    out.fill_(7.0)
    program.run(0, 1, 3)
    assert torch.equal(out[:3], ops.rms_norm(library, x[:3], weight, 1e-5))
    assert (out[3] == 7.0).all()


def test_a_run_of_no_rows_does_nothing(library: Library) -> None:
    program, out = note_norm(library, torch.randn(2, 8), torch.randn(8))
    out.fill_(7.0)
    program.run(0, 1, 0)
    assert (out == 7.0).all()


def test_every_kernel_that_may_be_captured_is_known_to_the_library(library: Library) -> None:
    for name, rows in ROWS_ARGUMENT.items():
        types = argument_types(name)
        assert types[rows] is ctypes.c_int
        Program(library).add(name, [0.0 if t is ctypes.c_float else 0 for t in types])


def test_a_call_that_cannot_be_captured_is_refused(library: Library) -> None:
    with library.recording(lambda name, arguments: None), pytest.raises(KeyError):
        library.functions(1)["pp_set_threads"](1)


def test_programs_free_their_memory(library: Library) -> None:
    program, _ = note_norm(library, torch.randn(2, 8), torch.randn(8))
    assert program.num_bytes >= 16 * 8
    del program
    gc.collect()
