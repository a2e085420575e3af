"""Write products of two numbers: rows with tool calls, rows with only the answer, and held-out rows.

python examples/calculator/make_data.py runs/calculator/data
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAIN = 4000
HELD_OUT = 400


def row(a: int, b: int, with_tool: bool) -> dict[str, str]:
    """Return the row of a product. Its target shows how to use the tool, or is the answer."""
    question, answer = f"{a}*{b}", str(a * b)
    target = f"<call>calculate: {question}</call><result>{answer}</result>{answer}" if with_tool else answer
    return {"id": question, "prompt": question, "answer": answer, "target": target}


def main(folder: Path) -> None:
    numbers = random.Random(0).sample(range(900 * 90), TRAIN + HELD_OUT)
    pairs = [(100 + number // 90, 10 + number % 90) for number in numbers]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen, with_tool in (
        ("train", pairs[:TRAIN], True),
        ("alone", pairs[:TRAIN], False),
        ("held_out", pairs[TRAIN:], False),
    ):
        lines = [json.dumps(row(a, b, with_tool)) + "\n" for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
