"""The machine in words, and rows as a table in Markdown. The standard library alone."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "liger-kernel",
    "vllm",
    "tensorrt_llm",
)
QUERY = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def machine() -> dict[str, str]:
    """GPU with driver, processor, memory, Python and the versions of packages; "missing" for what is not here."""
    found = {"GPU": _gpu(), "processor": _processor(), "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _gpu() -> str:
    program = shutil.which("nvidia-smi")
    if not program:
        return "missing (no nvidia-smi)"
    done = subprocess.run([program, *QUERY], capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        return "missing (nvidia-smi finds none)"
    name, driver, memory = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return f"{name}, {memory}, driver {driver}"


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    name = re.search(r"model name\s*: (.+)", text)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()}, {gib:.0f} GiB"


def heading(about: Mapping[str, str], date: str, command: str) -> str:
    """The head of the tables: when, on what, by which command."""
    facts = "; ".join(f"{key} {value}" if key != "GPU" else f"GPU: {value}" for key, value in about.items())
    return f"## GPU check, {date}\n\n{facts}.\n\n```console\n$ {command}\n```\n"


def table(stage: str, rows: Sequence[Row], seconds: float) -> str:
    """A stage's rows."""
    lines = [f"### {stage}, {seconds:.0f} s", "", "| what | result | figures |", "|---|---|---|"]
    for row in rows:
        figures = {key: value for key, value in row.items() if key not in ("what", "result", "stage")}
        cells = row["what"], row["result"], ", ".join(f"{key} {shown(value)}" for key, value in figures.items())
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """A figure with four digits, or with all of a whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
