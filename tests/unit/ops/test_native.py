"""Choice of the CPU kernels by the processor's flags in /proc/cpuinfo."""

from __future__ import annotations

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.ops.fused.native import LEVELS, choose_module

# Flags in the format of /proc/cpuinfo.
HASWELL = "fpu sse2 ssse3 fma movbe sse4_2 popcnt avx f16c abm bmi1 avx2 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
KNIGHTS_LANDING = f"{HASWELL} avx512f avx512cd avx512er avx512pf"  # AVX-512 without the extensions of x86-64-v4
SANDY_BRIDGE = "fpu sse2 ssse3 sse4_2 popcnt avx"
ALL = {"_C", "_C_v3", "_C_v4"}


@pytest.fixture
def cpuinfo(tmp_path):
    def write(flags: str):
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nvmx flags\t: avx512f\nflags\t\t: {flags}\nbugs\t\t: none\n")
        return path

    return write


@pytest.mark.parametrize(
    ("flags", "module"),
    [(SKYLAKE_X, "_C_v4"), (KNIGHTS_LANDING, "_C_v3"), (HASWELL, "_C_v3"), (SANDY_BRIDGE, "_C")],
)
def test_the_best_supported_level_is_chosen(cpuinfo, flags, module):
    assert choose_module(ALL, cpuinfo=cpuinfo(flags)) == module


def test_a_level_can_be_requested(cpuinfo):
    path = cpuinfo(SKYLAKE_X)
    assert [choose_module(ALL, level, path) for level in LEVELS] == ["_C_v4", "_C_v3", "_C"]


def test_an_unsupported_level_is_refused(cpuinfo):
    with pytest.raises(UserError, match=r"^BRORL_CPU=x86-64-v4: this processor has no avx512bw, avx512dq, avx512vl$"):
        choose_module(ALL, "x86-64-v4", cpuinfo(KNIGHTS_LANDING))
    with pytest.raises(UserError, match=r"no such level; it takes x86-64-v4, x86-64-v3, x86-64$"):
        choose_module(ALL, "avx2", cpuinfo(HASWELL))


def test_a_build_for_one_processor_has_no_choice(tmp_path):
    """The processor's flags are not read."""
    assert choose_module({"_C"}, cpuinfo=tmp_path / "none") == choose_module((), cpuinfo=tmp_path / "none") == "_C"
    with pytest.raises(UserError, match="BRORL_CPU=x86-64: this build of csrc is for one processor only"):
        choose_module({"_C"}, "x86-64")


def test_missing_processor_flags_are_reported(tmp_path):
    with pytest.raises(UserError, match=r"does not list the processor's flags; set BRORL_CPU=x86-64"):
        choose_module(ALL, cpuinfo=tmp_path / "none")
    assert choose_module(ALL, "x86-64", tmp_path / "none") == "_C"
