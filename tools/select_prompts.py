"""Choose held-out prompts that a model answers rightly so many times out of so many; write them as a data file.

brorl evaluate run.toml model.path=MODEL run.dir=PILOT --samples 512
python tools/select_prompts.py run.toml PILOT/evaluation.jsonl OUT.jsonl --right 1 32 --count 24 model.path=MODEL

The configuration is the one that was evaluated. Prompts are written as they were tokenized, so that a run on the file
takes data.template={prompt}. Which ones are chosen, where more fit, depends on their ids alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.config.load import load
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.source import load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import read_shape
from megatron_brorl.outputs import check_output
from megatron_brorl.report.comparison import Key, read_answers
from megatron_brorl.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file that was evaluated")
    parser.add_argument("evaluation", type=Path, help="its evaluation.jsonl")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--right", type=int, nargs=2, required=True, metavar=("LEAST", "MOST"), help="right samples")
    parser.add_argument("--count", type=int, required=True, help="prompts to choose")
    args = parser.parse_intermixed_args()
    config = load(args.config, args.overrides)
    read = [("the evaluation", args.evaluation), ("the configuration", Path(args.config))]
    check_output(args.out, [*read, *(("data.held_out", Path(name)) for name in config.data.held_out)])
    model = model_directory(config.model.path)
    limit = read_shape(model).context - config.rollout.max_tokens
    prompts = load_sources(config.data, load_tokenizer(model), limit, config.run.seed, config.reward).held_out
    chosen = select(prompts, read_answers(args.evaluation), *args.right)
    if len(chosen) < args.count:
        raise UserError(
            f"{args.evaluation}: {len(chosen)} held-out prompts have {args.right[0]} to {args.right[1]} right samples, "
            f"{args.count} were asked for: evaluate more (data.held_out_prompts) or widen --right"
        )
    args.out.write_text("".join(json.dumps(row_of(p)) + "\n" for p in chosen[: args.count]), encoding="utf-8")
    print(f"{args.out}: {args.count} of {len(chosen)} prompts with {args.right[0]} to {args.right[1]} right samples")


def select(prompts: Sequence[Prompt], answers: Mapping[Key, Mapping[str, Any]], least: int, most: int) -> list[Prompt]:
    """The held-out prompts with least to most right samples, in an order that only their ids decide."""
    right = {prompt: a["right"] for (benchmark, prompt), a in answers.items() if benchmark == "held_out"}
    found = [p for p in prompts if least <= right.get(p.id, -1) <= most]
    return sorted(found, key=lambda p: hashlib.blake2b(p.id.encode()).digest())


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A row of megatron_brorl.data.prompts."""
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "verifier": prompt.verifier,
        "metadata": dict(prompt.metadata),
    }


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"select_prompts: {e}", file=sys.stderr)
        sys.exit(2)
