#!/usr/bin/env python3
"""What a checkpoint costs the loop that trains: written at once, and while the next step goes on; against a step.

    python benchmarks/bench_checkpoint.py [--quick] [--json FILE] [--models tiny m75] [--threads N] [--repeat N]
                                          [--folder DIR]

One process takes the objects of `brorl train` through rounds of: a step, a checkpoint that it waits for, one that is
written meanwhile (train.checkpoint_async), and a step beside that. tiny: the model and the sizes of
examples/brorl_tiny.toml; m75: 75 million parameters, random like the other. The data are those of bench_step, so that
the optimizer has its moments and a checkpoint 12 bytes per parameter. Medians over rounds; the first step warms up.

step: seconds without any checkpoint. at_once, meanwhile: seconds that the loop is held up, and their shares of a step;
first: the first time, when the memory of the copy is new, and copy MiB, by which the process grew then. beside: how
much longer a step takes while a checkpoint is written. written: seconds from the copy to `latest`, with the disk and
the processor shared with the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_common import alone, options, write_rows
from bench_step import prompts, write_tokenizer
from random_model import qwen2_config, write_random_model

from megatron_brorl.cli.build import Program, Session
from megatron_brorl.cli.train import build_trainer
from megatron_brorl.config.load import load

# Vocabularies have room for bench_step's words.
MODELS = {
    "tiny": qwen2_config(hidden=128, layers=4, heads=4, kv_heads=2, ffn=384, vocab=512, context=128),
    "m75": qwen2_config(hidden=768, layers=11, heads=12, kv_heads=4, ffn=2048, vocab=8192, context=512),
}
SIZES = {"tiny": (512, 24, 8, 4), "m75": (32, 2, 8, 1)}  # siblings, prompts, response tokens, mini-batches
QUICK = (16, 2, 4, 1)
RUN = """
run.dir = "{dir}/run"
model.path = "{dir}/model"
data.train = ["{dir}/train.jsonl"]
rollout = {{ n = {n}, prompts = {prompts}, max_tokens = {response}, max_num_seqs = 4096 }}
reward = {{ workers = 1, extract = "answer_tag", strict = false, cut_off_factor = 1.0 }}
algo = {{ mini_batches = {batches}, mini_batch_of = "siblings", old_log_probs = "rollout" }}
train = {{ steps = 1000, tokens_per_micro_batch = 2048 }}
theory.every = 0
"""


class Silent:
    """In a display's place."""

    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """A checkpoint that is not written is no measurement."""
        sys.exit(f"bench_checkpoint: {text}")


def timed(function: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(job: tuple[str, tuple[int, int, int, int], argparse.Namespace]) -> dict[str, Any]:
    """The row of one model. job: its name, its sizes, the options."""
    name, sizes, args = job
    torch.set_num_threads(args.threads)
    n, asked, response, batches = sizes
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        # What a run is made of, as the command line would read it.
        folder = Path(scratch)
        parameters = write_random_model(MODELS[name], folder / "model", seed=0)
        write_tokenizer(MODELS[name]["vocab_size"], folder / "model")
        rows = [{"prompt": text, "answer": "1"} for text in prompts(MODELS[name]["vocab_size"], 8, 64)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        text = RUN.format(dir=folder, n=n, prompts=asked, response=response, batches=batches)
        (folder / "run.toml").write_text(text, encoding="utf-8")

        rounds = []
        with Session(load(folder / "run.toml", []), program=Program(goes_on=True)) as session:
            trainer, process = build_trainer(session, time.time()), psutil.Process()
            trainer.refit()
            trainer.train_step()
            # The first one takes the memory that the others have.
            before = process.memory_info().rss
            first = timed(lambda: trainer.save(wait=False))
            copy = process.memory_info().rss - before
            trainer.written(Silent(), wait=True)
            for _ in range(args.repeat):
                figures = {"step": timed(trainer.train_step), "at_once": timed(trainer.save)}
                figures["meanwhile"] = timed(lambda: trainer.save(wait=False))
                figures["beside"] = timed(trainer.train_step)
                trainer.written(Silent(), wait=True)
                rounds.append(figures | {"written": trainer.saving.write_s})
        newest = folder / "run" / "checkpoints" / f"step_{trainer.state.step - 1:08d}"
        size = sum(p.stat().st_size for p in newest.iterdir())

    found = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    return {
        "model": name,
        "parameters": parameters,
        "checkpoint_mib": size / 2**20,
        "copy_mib": copy / 2**20,
        "first": first,
        **found,
        "at_once_share": found["at_once"] / found["step"],
        "meanwhile_share": found["meanwhile"] / found["step"],
        "beside_share": found["beside"] / found["step"] - 1,
    }


def main() -> None:
    parser = options(__doc__, "small steps of the tiny model alone", 3, "rounds")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    args = parser.parse_args()
    if args.quick:
        args.models = ["tiny"]

    print(
        "model  parameters    MiB  copy MiB  step s  at once s  of step  first s  meanwhile  of step  beside  written"
    )
    rows = []
    for name in args.models:
        r = alone(measure, name, QUICK if args.quick else SIZES[name], args)
        rows.append(r)
        print(
            f"{name:6}{r['parameters']:11,d}{r['checkpoint_mib']:7.0f}{r['copy_mib']:10.0f}{r['step']:8.2f}"
            f"{r['at_once']:11.3f}{r['at_once_share']:9.1%}{r['first']:9.2f}{r['meanwhile']:11.3f}{r['meanwhile_share']:9.1%}"
            f"{r['beside_share']:+8.1%}{r['written']:9.2f}",
            flush=True,
        )
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
