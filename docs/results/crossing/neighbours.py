"""Print pass@1 of the products next to each trained one, before and after training, from 64 samples of each.

python docs/results/crossing/neighbours.py START_MODEL runs/crossing runs/crossing_study
"""

import json
import sys
from pathlib import Path

import pandas as pd

from megatron_brorl import Engine
from megatron_brorl.config.load import load

CONFIG = load(Path(__file__).parent.parent / "plateau" / "products.toml")
SEEDS = 18
RARE_SEEDS = 12  # seeds 0 to 11 train on a prompt of RARE in prompts.py, the others on one of COMMON


def pass_at_1(model: Path, rows: list[dict[str, str]]) -> float:
    rollout = CONFIG.rollout
    prompts = [CONFIG.data.template.format(prompt=row["prompt"]) for row in rows]
    with Engine.from_pretrained(model) as engine:
        groups = engine.sample(prompts, n=64, max_tokens=rollout.max_tokens, stop=rollout.stop_strings)
    right = [s.text.strip() == row["answer"] for row, group in zip(rows, groups, strict=True) for s in group]
    return sum(right) / len(right)


def main(start: str, directory: str, study: str) -> None:
    rates = []
    for seed in range(SEEDS):
        rows = [json.loads(line) for line in (Path(directory) / f"{seed}_near.jsonl").read_text().splitlines()]
        runs = sorted((Path(study) / "runs").glob(f"*-seed{seed}-*/model"))
        models = {"start": Path(start)} | {model.parent.name.partition("-seed")[0]: model for model in runs}
        rates.append({arm: pass_at_1(model, rows) for arm, model in models.items()})
    table = pd.DataFrame(rates, index=pd.RangeIndex(SEEDS, name="seed"))
    print(table.map("{:.1%}".format).to_string())
    print(table.groupby(table.index < RARE_SEEDS).mean().rename({True: "rare", False: "common"}).map("{:.1%}".format))


if __name__ == "__main__":
    main(*sys.argv[1:])
