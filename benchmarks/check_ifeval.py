#!/usr/bin/env python3
"""Check a file of IFEval prompts, and measure the reward of responses without content.

    python benchmarks/check_ifeval.py input_data.jsonl [--min-words N]

The first line with an instruction that verifier "ifeval" does not know ends the check. The floor of a response is its
mean reward over all prompts: the share of instructions that it follows, and the share of prompts whose instructions
it follows completely.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from megatron_brorl.data.prompts import Row, check_row
from megatron_brorl.data.published_sets import SETS
from megatron_brorl.data.readers import parse_row, raw_rows
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.verifiers.ifeval import verify

EVERYTHING = (
    '"<<t>>\n* [a] [b] *h* **i**\nSECTION 1 SECTION 2 My answer is yes.\nP.S. P.P.S ****** x Any other questions?"'
)
RESPONSES = {"x": "x", "a letter in quotes": '"x"', "hello": "hello", "everything at once": EVERYTHING}


def read(path: Path) -> list[Row]:
    """Return the rows of a published file."""
    rows = []
    for number, raw in raw_rows(path):
        where = f"{path}:{number}"
        rows.append(check_row(SETS["ifeval"].row(parse_row(raw, where), where), where, where))
    if not rows:
        raise UserError(f"{path}: the file has no prompts; name the file that has them")
    return rows


def floor(rows: list[Row], response: str, mode: str, min_words: int) -> tuple[float, float]:
    """Return the mean share of followed instructions over prompts, and the share of prompts with all followed."""
    scores = []
    for row in rows:
        metadata = {**row.metadata, "mode": mode, "min_words": min_words}
        data = VerifierRow(id=row.id, prompt="", answer=None, metadata=metadata, columns={})
        scores.append(verify(response, data).reward)
    return sum(scores) / len(rows), sum(reward == 1 for reward in scores) / len(rows)


def main() -> int:
    """Check the file, and print its instructions and floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--min-words", type=int, default=0, help="metadata.min_words of the floors (%(default)s)")
    args = parser.parse_args()
    try:
        rows = read(args.file)
    except UserError as e:
        print(f"check_ifeval: {e}", file=sys.stderr)
        return 2

    kinds = Counter(kind for row in rows for kind in row.metadata["instruction_id_list"])
    print(f"{len(rows)} prompts, {kinds.total()} instructions of {len(kinds)} kinds, all known\n")
    print("| instruction | times |\n|---|---|")
    for kind, times in sorted(kinds.items()):
        print(f"| {kind} | {times} |")
    print("\n| response | strict share | strict all | loose share | loose all |\n|---|---|---|---|---|")
    for name, response in RESPONSES.items():
        figures = [figure for mode in ("strict", "loose") for figure in floor(rows, response, mode, args.min_words)]
        print(f"| {name} | {' | '.join(f'{figure:.1%}' for figure in figures)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
