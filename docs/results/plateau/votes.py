"""Compare the votes of 512 and of 16 samples on the held-out products, from one model (phase 5 of README.md).

python docs/results/plateau/votes.py MODEL runs/products/held_out.jsonl

A vote is the most frequent answer, as of reward.group_function = "majority". Prints a table, and the difference with
the 95% interval of Student's paired test over prompts.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from scipy import stats

from megatron_brorl import Engine
from megatron_brorl.config.load import load
from megatron_brorl.rewards.group import majority

SHARE = 0.375  # reward.majority_share: a group whose most frequent answer has a smaller share has no label


def vote(answers: list[str], reference: str) -> dict[str, bool]:
    """Return whether the most frequent answer is right, and whether it has the share that a label needs."""
    scores = majority(answers, "exact")  # 1.0 for each answer that equals the most frequent one, else 0.0
    voted = answers[scores.index(1.0)]
    return {"right": voted == reference, "has_label": sum(scores) >= SHARE * len(answers)}


def main(model: str, held_out: str) -> None:
    config = load(Path(__file__).parent / "products.toml")
    rows = [json.loads(line) for line in Path(held_out).read_text().splitlines()]
    prompts = [config.data.template.format(prompt=row["prompt"]) for row in rows]
    rollout = config.rollout
    with Engine.from_pretrained(model) as engine:
        groups = engine.sample(prompts, n=16 + 512, max_tokens=rollout.max_tokens, stop=rollout.stop_strings)
    votes = []
    for row, group in zip(rows, groups, strict=True):
        answers = [sample.text.strip() for sample in group]
        votes += [
            {"prompt": row["id"], "n": len(voters), **vote(voters, row["answer"])}
            for voters in (answers[:16], answers[16:])
        ]
    table = pd.DataFrame(votes)
    for n, prompt_votes in table.groupby("n"):
        right, has_label = prompt_votes.right, prompt_votes.has_label
        print(f"N = {n}: right {right.mean():.1%}; labels {has_label.mean():.1%}, right {right[has_label].mean():.1%}")
    right_by_n = table.pivot(index="prompt", columns="n", values="right").astype(float)
    difference = right_by_n[512] - right_by_n[16]
    low, high = stats.ttest_1samp(difference, 0).confidence_interval()
    print(f"N = 512 minus N = 16: {100 * difference.mean():+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
