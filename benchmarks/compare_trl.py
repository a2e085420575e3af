#!/usr/bin/env python3
"""Reward over seconds of this project and of TRL's GRPOTrainer: the same model, rows, rollouts and updates.

    python benchmarks/compare_trl.py CONFIG.toml [section.key=value ...] --trl-python PYTHON [--out DIR] [--device cuda]
                                     [--threads N]

--trl-python is the interpreter of an environment with trl:
python -m venv trl; trl/bin/pip install torch==2.13.0 trl==1.16.0 --extra-index-url https://download.pytorch.org/whl/cpu

CONFIG is a configuration such as examples/smollm2/sums.toml, whose rows have the verifier `exact`. SIZES replaces its
sizes, because a step of TRL may take minutes. Overrides come after SIZES. Three models are trained from the same
weights: by TRL, by this project in as many steps, and by this project until its steps have taken as long as those of
TRL. `brorl evaluate` measures held-out pass@1 of the untrained model and of these.

Equal on both sides: the prompts of each step, rollouts, temperature, length limit, tokens that end a response (all with
a stop string in their text), reward, GRPO's advantage and the clipped loss (SAME), updates, AdamW, warm-up. Different:
random numbers; TRL shuffles the responses of a step before it splits them into mini-batches, and this project follows
algo.mini_batch_of; TRL divides the loss by the step's tokens over the number of mini-batches, and this project by the
tokens of the mini-batch; TRL adds 1e-4 to a group's standard deviation, and this project 1e-6. This project runs one
process per thread, or one on a GPU. TRL runs one process with all threads, without gradient checkpointing.

seconds: those of training steps. peak MiB: resident set of all processes at its peak, on this side with start and
export; on a GPU, torch's tensors. others: the share of the machine that other processes used; above a few percent,
measure again. --out receives compare_trl.json, compare_trl.png and all models. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from bench_common import add_device, brorl, train, write_rows
from measure import EngineFailed, ask

from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.source import load_sources
from megatron_brorl.data.tokenizers import load_tokenizer, stop_ids
from megatron_brorl.errors import UserError
from megatron_brorl.report.comparison import table
from megatron_brorl.report.plots import BLUE, ORANGE, figure_of, panel, save

SIZES = ["rollout.n=32", "rollout.prompts=4", "train.steps=8"]
SAME = [
    "algo.advantage=grpo", "algo.dynamic_sampling=false", "algo.policy_loss=clip", "algo.ratio=token",
    "algo.dual_clip=0.0", "algo.aggregation=token_mean", "algo.kl_coef=0.0", "algo.epochs=1",
    "optim.lr_schedule=constant", "optim.eps=1e-8", "optim.clip_grad=1.0", "rollout.top_p=1.0", "rollout.top_k=0",
]  # fmt: skip
TRAIN = ["data.held_out=[]", "train.checkpoint_every=0"]  # without evaluations
ENDLESS = "train.steps=1000000"
MICRO_BATCH = 64  # TRL's, in responses


def trl_job(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Return the job of trainer_trl.py. Raises UserError if TRL cannot run the configuration in the same way."""
    model = model_directory(config.model.path)
    tokenizer = load_tokenizer(model)
    rollout, algo, optim = config.rollout, config.algo, config.optim
    if any(len(stop) > 1 for stop in rollout.stop_strings):
        raise UserError("rollout.stop_strings: use strings of one character, because TRL ends a response by its tokens")
    texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocab_size))
    stop_string_ids = {i for i, text in texts if any(stop in text for stop in rollout.stop_strings)}

    # The prompts of all steps, in the order in which this project trains on them.
    sources = load_sources(config.data, tokenizer, sys.maxsize, config.run.seed, config.reward)
    prompts = sources.train.prompts(start=0, count=config.train.steps * rollout.prompts)
    if sources.verifiers != {"exact"}:
        raise UserError(f"{args.config}: rows have the verifier {', '.join(sources.verifiers)}; use exact")
    mini_batch = rollout.prompts * rollout.n // algo.mini_batches
    micro_batch = math.gcd(MICRO_BATCH, mini_batch)

    arguments = {
        "seed": config.run.seed,
        "max_steps": config.train.steps * algo.mini_batches,
        "num_generations": rollout.n,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": mini_batch // micro_batch,
        "steps_per_generation": mini_batch // micro_batch * algo.mini_batches,
        "max_completion_length": rollout.max_tokens,
        "temperature": rollout.temperature,
        "epsilon": algo.eps_low,
        "epsilon_high": algo.eps_high,
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "weight_decay": optim.weight_decay,
    }
    return {
        "model": str(model),
        "scratch": str(args.out),
        "dtype": config.model.dtype,
        "threads": args.threads,
        "device": args.device,
        "rows": [{"prompt": p.text, "answer": (p.answer or "").strip()} for p in prompts],
        "pattern": r"(?s)\A.*\Z",
        "cut_off_factor": config.reward.cut_off_factor,
        "stop_ids": sorted({*stop_ids(model, tokenizer), *stop_string_ids}),
        "warmup_steps": optim.warmup_steps,
        "arguments": arguments,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the untrained model and of the three trained ones, with all steps of their training."""
    overrides = [*SIZES, *args.overrides, *SAME]
    config = load(args.config, overrides)
    # On a GPU, the process that starts the run must train, so that its device memory is measured.
    processes = [f"--processes={args.threads}"] if args.device == "cpu" else []
    command = [*processes, str(args.config), *overrides]
    job = trl_job(config, args)
    args.out.mkdir(parents=True)

    def ours(name: str, *limits: str) -> dict[str, Any]:
        return train(args.out / name, [*command, *TRAIN, *limits, f"run.dir={args.out / name}"], threads=1)

    # TRL is first, because its seconds are the limit of the last run.
    trl = ask(args.trl_python, "trainer_trl.py", job, args.out)
    seconds = sum(step["step"] for step in trl["steps"])
    runs = {
        "untrained": {"model": config.model.path, "steps": []},
        "TRL": trl,
        "brorl, equal rollouts": ours("rollouts"),
        "brorl, equal seconds": ours("seconds", ENDLESS, f"train.max_seconds={seconds}"),
    }
    for i, run in enumerate(runs.values()):
        out = args.out / f"evaluation_{i}"
        brorl(["evaluate", *command, f"model.path={run['model']}", f"run.dir={out}"], threads=1)
        run["pass_at_1"] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["pass_at_1"]
        run["seconds"] = list(itertools.accumulate(step["step"] for step in run["steps"]))
        run["rollouts"] = [config.rollout.prompts * config.rollout.n * (i + 1) for i in range(len(run["steps"]))]
    return [{"run": name, "n": config.rollout.n, "threads": args.threads, **run} for name, run in runs.items()]


def line(row: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    cells = [row["run"], "{mean:.1%} ({low:.1%} to {high:.1%})".format(**row["pass_at_1"])]
    if steps := row["steps"]:
        seconds = row["seconds"][-1]
        cells += [str(len(steps)), f"{row['rollouts'][-1]:,}", f"{seconds:.0f}", f"{seconds / len(steps):.1f}"]
        cells += [f"{steps[0]['reward']:.3f}, {steps[-1]['reward']:.3f}"]
        cells += [f"{row['peak_mib']:,.0f}", f"{row['others_cpu_share']:.0%}"]
    return cells


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table, and the rollouts of TRL in the seconds that this project needs for all of them."""
    head = ["run", "held-out pass@1 (95% interval)", "steps", "rollouts", "seconds", "s per step"]
    print(table([[*head, "reward of first and last step", "peak MiB", "others"], *map(line, rows)]))
    _untrained, trl, ours, _equal_seconds = rows
    limit = ours["seconds"][-1]
    trl_rollouts = max((r for r, s in zip(trl["rollouts"], trl["seconds"], strict=True) if s <= limit), default=0)
    print(f"After {limit:.0f} s, this project has {ours['rollouts'][-1]:,} rollouts and TRL has {trl_rollouts:,}.")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the training reward of TRL and of this project in equal seconds, over seconds and over rollouts."""
    figure, panels = figure_of(rows=1, columns=2, width=11, height=4)
    for axes, key in zip(panels, ("seconds", "rollouts"), strict=True):
        for row, color in ((rows[1], ORANGE), (rows[3], BLUE)):
            rewards = [step["reward"] for step in row["steps"]]
            axes.plot(row[key], rewards, color=color, marker="o", markersize=3, label=row["run"].partition(",")[0])
        panel(axes, f"N = {rows[0]['n']}, threads: {rows[0]['threads']}", "training reward", key)
        axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with trl")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_trl"), help="new folder (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_device(parser)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} exists: name a new folder")
    try:
        rows = measure(args)
    except (EngineFailed, UserError, OSError) as e:
        sys.exit(f"compare_trl: {e}")
    show(rows)
    draw(rows, args.out / "compare_trl.png")
    write_rows(args.out / "compare_trl.json", rows)


if __name__ == "__main__":
    main()
