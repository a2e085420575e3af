#!/usr/bin/env python3
"""Check a file of IFEval prompts, and measure what responses that say nothing are worth on it.

    python benchmarks/check_ifeval.py input_data.jsonl [--min-words N]

Takes the published form (a line has key, prompt, instruction_id_list and kwargs) and the rows of this project, and
refuses the first line whose instructions the verifier "ifeval" does not know. The floor of a response is its mean
reward over all prompts: the share of instructions that it follows (mean of the prompts' shares, as the reward is by
default), and the share of prompts of which it follows all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.verifiers.ifeval import check_row, load, score

INSTRUCTIONS = ("instruction_id_list", "kwargs")
KITCHEN_SINK = (
    '"<<t>>\n* [a] [b] *h* **i**\nSECTION 1 SECTION 2 My answer is yes.\nP.S. P.P.S ****** x Any other questions?"'
)
RESPONSES = {"x": "x", "a letter in quotes": '"x"', "hello": "hello", "everything at once": KITCHEN_SINK}


def read(path: Path) -> list[VerifierRow]:
    """The checked rows of the file."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None

    # Either form, line by line, so that a message can name the first that is wrong.
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as e:
            raise UserError(f"{where}: not valid JSON: {e}; mend or remove the line") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
            raise UserError(f'{where}: a line must be an object with a "prompt" and its instructions')

        # The published form has the instructions beside the prompt.
        published = "instruction_id_list" in raw
        metadata = {key: raw.get(key) for key in INSTRUCTIONS} if published else raw.get("metadata")
        name = str(raw.get("key" if published else "id") or f"{path.name}:{number}")
        row = VerifierRow(id=name, prompt=raw["prompt"], answer=None, metadata=metadata or {})
        check_row(row, where)
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: the file has no prompts; name the file that has them")
    return rows


def floor(rows: list[VerifierRow], response: str, mode: str, min_words: int) -> tuple[float, float]:
    """Mean reward of one response to every prompt: by shares, and for following all."""
    scored = [
        score(response, {**row, "metadata": {**row["metadata"], "mode": mode, "min_words": min_words}}) for row in rows
    ]
    return sum(s.reward for s in scored) / len(rows), sum(s.reward == 1 for s in scored) / len(rows)


def main() -> int:
    """Check the file, print its kinds and floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--min-words", type=int, default=0, help="metadata.min_words of the floors (%(default)s)")
    args = parser.parse_args()

    # Nothing is measured where a line is wrong.
    try:
        rows = read(args.file)
    except UserError as e:
        print(f"check_ifeval: {e}", file=sys.stderr)
        return 2

    # What is in the file.
    kinds = Counter(kind for row in rows for kind in row["metadata"]["instruction_id_list"])
    print(f"{len(rows)} prompts, {kinds.total()} instructions of {len(kinds)} kinds, all known\n")
    print("| instruction | times |\n|---|---|")
    for kind, times in sorted(kinds.items()):
        print(f"| {kind} | {times} |")

    # What a policy gets for nothing.
    load()
    print("\n| response | strict share | strict all | loose share | loose all |\n|---|---|---|---|---|")
    for name, response in RESPONSES.items():
        figures = [figure for mode in ("strict", "loose") for figure in floor(rows, response, mode, args.min_words)]
        print(f"| {name} | {' | '.join(f'{figure:.1%}' for figure in figures)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
