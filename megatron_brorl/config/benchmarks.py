"""How evaluate.benchmarks names a benchmark."""

from __future__ import annotations

from pathlib import Path


def named(benchmark: str) -> tuple[str, str]:
    """Name and file of "name=FILE"; a FILE alone is called what it is called, without its ending.

    What stands before = is no name where it has a slash: that is a file in a folder such as lr=3/.
    """
    name, equals, file = benchmark.partition("=")
    if equals and "/" not in name:
        return name.strip(), file
    return Path(benchmark).stem, benchmark
