"""A checkpoint written at once, and one of the same state written while the next step changes all of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
from dist.jobs import grid_of
from dist.steps import _Silent, configured, make_trainer

from megatron_brorl.checkpoints.training import Save


def both_ways(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> tuple[list[dict[str, float]], list[str], bool]:
    """Two steps, both checkpoints, and two steps more: figures, what lay in the second's folder while the third step
    was done, and whether it was still under way then."""
    trainer = make_trainer(directory, grid_of(**parallel), configured(changes), fakes.Engine())
    trainer.seconds = lambda: 7.5  # type: ignore[method-assign]  # wall-clock time, which run.json holds
    trainer.refit()
    figures = [trainer.train_step()[0] for _ in range(2)]

    def into(name: str) -> None:
        run = replace(trainer.config.run, dir=f"{root}/{name}")
        trainer.config = replace(trainer.config, run=run)

    into("at_once")
    trainer.save()

    # Nothing reaches the disk before the third step is done on all ranks.
    changed, write = threading.Event(), Save.write

    def late(*arguments: Any) -> None:
        assert changed.wait(60)
        write(*arguments)

    into("meanwhile")
    Save.write = late  # type: ignore[method-assign]
    try:
        trainer.save(wait=False)
        figures.append(trainer.train_step()[0])
        there = sorted(p.name for p in Path(f"{root}/meanwhile/checkpoints").iterdir())
        busy = trainer.saving.busy()
        changed.set()
        # Its messages and those of a step, at the same time.
        figures.append(trainer.train_step()[0])
        assert trainer.written(_Silent(), wait=True)
    finally:
        Save.write = write  # type: ignore[method-assign]
    return figures, there, busy
