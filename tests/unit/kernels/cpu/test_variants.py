"""Builds of the native kernels: a compiler makes all, a CPU gets the widest that it runs."""

from __future__ import annotations

import platform

import pytest

from polypath.kernels.cpu.library import load
from polypath.kernels.cpu.variants import built_variants, fitting_variants
from polypath.runtime.planning.probe import probe


def test_where_a_compiler_works_every_build_is_installed() -> None:
    if probe().compiler.path is None:
        pytest.skip("no C++ compiler here")
    x86 = ("avx512", "avx2") if platform.machine() == "x86_64" else ()
    assert built_variants() == (*x86, "portable")


def test_a_cpu_gets_the_widest_build_that_its_flags_allow() -> None:
    avx2 = {"avx2", "fma", "f16c"}
    assert fitting_variants(()) == ("portable",)
    assert fitting_variants(avx2 - {"fma"}) == ("portable",)
    assert fitting_variants(avx2) == ("avx2", "portable")
    wide = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
    assert fitting_variants(wide) == ("avx512", "avx2", "portable")


def test_a_missing_build_says_what_to_install() -> None:
    with pytest.raises(OSError, match="install a C\\+\\+ compiler"):
        load("sparc")
