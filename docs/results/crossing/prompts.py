"""Choose the prompts of the crossing study: products of a two-digit and a one-digit number.

README.md in this folder has the commands. Each step reads the evaluation of the file that the step before has written.

python docs/results/crossing/prompts.py DIRECTORY
    Write all.jsonl, 716 products.
python docs/results/crossing/prompts.py DIRECTORY EVALUATION.jsonl
    Write candidates.jsonl, 96 of the products that are right at most twice in 64 samples.
python docs/results/crossing/prompts.py DIRECTORY EVALUATION.jsonl 4096
    Write a file for each prompt of the study, 0.jsonl to 17.jsonl, 100.jsonl and 101.jsonl, and its neighbours.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

SOLVED = {(52, 7), (84, 9), (31, 6), (75, 8)}  # the lines of data.template in ../plateau/products.toml
CANDIDATES = 96
# Lowest and highest success rate, and the seeds of the study that train on such a prompt.
RARE = ((0.001, 0.005), [100, 101, *range(12)])
COMMON = ((0.01, 0.03), [*range(12, 18)])


def write(path: Path, products: Iterable[tuple[int, int]]) -> None:
    rows = [{"id": f"{a} * {b}", "prompt": f"{a} * {b}", "answer": str(a * b)} for a, b in products]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def numbers(row_id: str) -> tuple[int, int]:
    a, _, b = row_id.split()
    return int(a), int(b)


def neighbours(a: int, b: int) -> list[tuple[int, int]]:
    """Return six products that share one number with a * b."""
    near = [(a - 2, b), (a - 1, b), (a + 1, b), (a + 2, b), (a, b - 1), (a, b + 1)]
    return [(c, d) for c, d in near if 10 <= c < 100 and 2 <= d < 10 and (c, d) not in SOLVED]


def main(directory: Path, evaluation: str = "", samples: str = "") -> None:
    if not evaluation:
        write(directory / "all.jsonl", [(a, b) for a in range(10, 100) for b in range(2, 10) if (a, b) not in SOLVED])
        return
    results = pd.read_json(evaluation, lines=True)  # `right`: number of right samples of a prompt
    if not samples:
        rare = results[results.right <= 2].id.to_list()
        random.Random(0).shuffle(rare)
        write(directory / "candidates.jsonl", map(numbers, rare[:CANDIDATES]))
        return
    for (low, high), seeds in (RARE, COMMON):
        suitable = results[results.right.between(low * int(samples), high * int(samples))].id
        if len(suitable) < len(seeds):
            sys.exit(
                f"prompts.py: {len(suitable)} candidates are right in {low:.1%} to {high:.1%}, {len(seeds)} are needed"
            )
        for seed, row_id in zip(seeds, suitable, strict=False):
            write(directory / f"{seed}.jsonl", [numbers(row_id)])
            write(directory / f"{seed}_near.jsonl", neighbours(*numbers(row_id)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
