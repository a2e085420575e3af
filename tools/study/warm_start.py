"""A warm start, and the prompts that are its own: trained ones in bins by difficulty, and unseen ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import make_tiny_model
from select_prompts import row_of

from megatron_brorl.cli import sft
from megatron_brorl.cli.build import Session
from megatron_brorl.cli.files import write_json
from megatron_brorl.errors import UserError
from megatron_brorl.train.refit import refit
from megatron_brorl.types import Prompt
from study.answers import ask
from study.design import Bin, Design
from study.places import UNSEEN, place_of

TRAINED, UNTRAINED, SUPPORT = "study trained", "study unseen", "study support"  # streams of random numbers
_HELD_OUT = 1_000_000  # added to a warm start's seed: no stage trains on the prompts of that seed


def make_model(design: Design, directory: Path, seed: int) -> None:
    """The random model and its tokenizer; a job of one process."""
    config = design.run_config(_common(design, seed))
    print(make_tiny_model.make(config, place_of(directory, seed).folder / "random", **design.warm_starts.model))


def train(design: Design, directory: Path, seed: int, stage: int) -> None:
    """One stage of the supervised training; the last one's model is Place.model."""
    folder, stages = place_of(directory, seed).folder, design.warm_starts.stages

    def of(number: int) -> Path:
        return folder / ("warm" if number == len(stages) - 1 else f"stage{number}")

    # Every stage has examples of its own.
    before = of(stage - 1) / "model" if stage else folder / "random"
    own = [f"model.path={before}", f"run.dir={of(stage)}", f"data.train_seed={1000 * (stage + 1) + seed}"]
    sft.execute(design.run_config([*_common(design, seed), *own, *stages[stage]]))


def choose_prompts(design: Design, directory: Path, seed: int) -> None:
    """Choose prompts by how the warm start answers, and note how it begins.

    Raises UserError where a bin has too few prompts, with how many there are.
    """
    # Prompts of the pool are held out of the supervised training, whose stream leaves them out.
    place, p, e = place_of(directory, seed), design.prompts, design.evaluation
    own = [f"model.path={place.model}", f"run.dir={place.folder / 'pilot'}"]
    with Session(design.run_config([*_common(design, seed), *own])) as session:
        rollouts = session.rollouts()
        refit(session.worker(None), rollouts.engine, 0)
        unseen, pool = split(session.sources.held_out, p.unseen)
        pilot = ask(session, rollouts, pool, p.samples, e.k, "study pilot")
        right = dict(zip(pilot["prompts"], pilot["right"], strict=True))
        bins = {b.name: choose(pool, right, b, p.trained, f"warm start {seed}") for b in p.bins}

        # Asked once for all runs that begin here: they have these weights, prompts and random numbers in common.
        start = {UNSEEN: ask(session, rollouts, unseen, e.final_unseen, e.k, UNTRAINED)}
        for name, prompts in bins.items():
            start[name] = ask(session, rollouts, prompts, e.trained, e.k, TRAINED)
            if e.support:
                start[f"{name} support"] = ask(session, rollouts, prompts, e.support, e.k, SUPPORT)

        # The last file says that all are there.
        if session.is_main_rank:
            for name, prompts in {UNSEEN: unseen, **bins}.items():
                rows = "".join(json.dumps(row_of(prompt)) + "\n" for prompt in prompts)
                place.prompts(name).write_text(rows, encoding="utf-8")
            write_json(place.start, {"pilot": pilot, **start})


def split(prompts: Sequence[Prompt], unseen: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `unseen` prompts in an order that only their ids decide, and the others."""
    ordered = sorted(prompts, key=_hash)
    return ordered[:unseen], ordered[unseen:]


def choose(pool: Sequence[Prompt], right: Mapping[str, int], of: Bin, count: int, where: str) -> list[Prompt]:
    """`count` prompts of a bin, those first whose ids come first by hash. Raises UserError where there are too few."""
    found = sorted((p for p in pool if of.least <= right[p.id] <= of.most), key=_hash)
    if len(found) < count:
        raise UserError(
            f"{where}: {len(found)} prompts of the pool are right {of.least} to {of.most} times (bin {of.name}), "
            f"{count} were asked for: widen the bin, raise prompts.pool or train the warm start otherwise"
        )
    return found[:count]


def _common(design: Design, seed: int) -> list[str]:
    """Overrides that all commands of a warm start share: its seeds, and the prompts that are held out."""
    held_out = design.prompts.pool + design.prompts.unseen
    return [f"run.seed={seed}", f"data.held_out_seed={_HELD_OUT + seed}", f"data.held_out_prompts={held_out}"]


def _hash(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.id.encode()).digest()
