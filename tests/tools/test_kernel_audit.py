"""The audit of the CUDA kernels: what it reads of ptxas' report, and occupancy against cases worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import kernel_audit

REPORT = """\
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90'
ptxas info    : Function properties for _Z6secondv
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size, 384 bytes smem
"""


def test_each_kernel_has_its_own_figures():
    """The first has no shared memory, and does not get the second's."""
    assert kernel_audit.REPORT.findall(REPORT) == [
        ("_Z5firstv", "0", "0", "0", "40", ""),
        ("_Z6secondv", "16", "8", "4", "32", "384"),
    ]


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "share"),
    [
        (512, 32, 0, 1.0),  # 1,024 registers a warp: 64 warps of 64
        (512, 33, 0, 48 / 64),  # 1,280 a warp: 51 warps, 48 in fours, 3 blocks of 16
        (256, 64, 0, 32 / 64),  # 2,048 a warp: 32 warps
        (32, 16, 0, 32 / 64),  # 32 blocks of a warp
        (256, 32, 100 << 10, 16 / 64),  # 101 KiB a block: 2 of 228
    ],
)
def test_occupancy(threads, registers, shared, share):
    assert kernel_audit.occupancy(threads, registers, shared) == share
