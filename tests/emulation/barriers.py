"""Takes each barrier of csrc's kernels away in turn and says whether the cases of tests/gpu see it.

    python tests/emulation/barriers.py [NUMBER ...]     # those barriers; without a number, all of them: a minute each

`__syncthreads_or` is left where it is: without it a kernel lacks a value, not only an order. Exits with 1 where the
cases pass all the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from emulation import build  # noqa: E402

BARRIER = re.compile(r"\b__syncthreads\(\)")
CSRC = build.ROOT / "csrc"


def barriers() -> list[tuple[Path, int]]:
    """The file and the place of each in its text, file by file."""
    files = sorted(p for p in CSRC.rglob("*") if p.suffix in (".cu", ".h"))
    return [(p, found.start()) for p in files for found in BARRIER.finditer(p.read_text(encoding="utf-8"))]


def seen(file: Path, place: int) -> str:
    """The first case that fails without it; "" where none does. Raises RuntimeError where the cases did not run."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = shutil.copytree(CSRC, Path(folder, "csrc"))
        text = file.read_text(encoding="utf-8")
        (csrc / file.relative_to(CSRC)).write_text(text[:place] + BARRIER.sub("", text[place:], count=1), "utf-8")
        cases = [str(p.relative_to(build.ROOT)) for p in sorted((TESTS / "gpu").glob("test_*_cuda.py"))]
        cases = [p for p in cases if "engine" not in p]  # the engine's own steps need a GPU
        path = os.pathsep.join([str(build.ROOT), str(TESTS)])
        command = [sys.executable, str(TESTS / "emulation" / "run_cases.py"), str(csrc), "-x", "-rf", *cases]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the cases did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^FAILED tests/gpu/(.*?)(?: - |$)", done.stdout, re.M)
    return failed[1] if failed else ""


def main() -> None:
    every = barriers()
    unseen = 0
    for number in map(int, sys.argv[1:] or range(len(every))):
        file, place = every[number]
        text = file.read_text(encoding="utf-8")
        line = text.count("\n", 0, place) + 1
        case = seen(file, place)
        unseen += not case
        print(f"{number:2} {file.relative_to(CSRC)}:{line}  {case or 'NOT SEEN'}", flush=True)
    sys.exit(unseen > 0)


if __name__ == "__main__":
    main()
