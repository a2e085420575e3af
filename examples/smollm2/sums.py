"""Write train.jsonl and held_out.jsonl: all sums of a two-digit and a one-digit number, without those of the template.

python examples/smollm2/sums.py runs/sums
"""

import json
import random
import sys
from pathlib import Path

SOLVED = {(52, 7), (84, 9), (31, 6), (75, 8)}  # the lines of data.template in sums.toml
HELD_OUT = 250


def row(a: int, b: int) -> dict[str, object]:
    """Return the row of a sum. Results are reported for each metadata.task."""
    carry = a % 10 + b > 9
    task = "with carry" if carry else "without carry"
    return {"id": f"{a}+{b}", "prompt": f"{a} + {b}", "answer": str(a + b), "metadata": {"task": task}}


def main(directory: Path) -> None:
    sums = [(a, b) for a in range(10, 100) for b in range(1, 10) if (a, b) not in SOLVED]
    random.Random(0).shuffle(sums)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": sums[HELD_OUT:], "held_out": sums[:HELD_OUT]}.items():
        lines = [json.dumps(row(a, b)) + "\n" for a, b in part]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
