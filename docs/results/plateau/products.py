"""Write train.jsonl (512 rows) and held_out.jsonl (200 rows): products of a two-digit and a one-digit number.

python docs/results/plateau/products.py runs/products

With the results of an evaluation of train.jsonl, write hard.jsonl: the 8 rows with the lowest success rate above 0.

python docs/results/plateau/products.py runs/products EVALUATION.jsonl
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

SOLVED = {(52, 7), (84, 9), (31, 6), (75, 8)}  # the lines of data.template in products.toml
HELD_OUT = 200  # rows
TRAIN = 512
HARD = 8


def write(path: Path, products: Iterable[str]) -> None:
    rows = [{"id": p, "prompt": p, "answer": str(int(p.split()[0]) * int(p.split()[2]))} for p in products]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(directory: Path, evaluation: str = "") -> None:
    if evaluation:
        solved_once = pd.read_json(evaluation, lines=True).query("right > 0").sort_values(["right", "id"])
        write(directory / "hard.jsonl", solved_once.id.head(HARD))
        return
    products = [f"{a} * {b}" for a in range(10, 100) for b in range(2, 10) if (a, b) not in SOLVED]
    random.Random(0).shuffle(products)
    write(directory / "held_out.jsonl", products[:HELD_OUT])
    write(directory / "train.jsonl", products[HELD_OUT : HELD_OUT + TRAIN])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
