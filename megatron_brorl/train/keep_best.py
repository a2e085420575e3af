"""Which evaluation makes a checkpoint the best one (train.keep_best), and what is done with it at the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.folders import Best
from megatron_brorl.config.schema import Config
from megatron_brorl.train.console import passes
from megatron_brorl.train.state import RunState


def new_best(config: Config, state: RunState, metrics: Mapping[str, float]) -> Best | None:
    """What the weights after state.step are the best in; None where they are not, or were not evaluated.

    metrics: of the step, with those of its evaluation.
    """
    found, figure = passes(metrics), config.train.keep_best
    if not (found and figure):
        return None
    k = max(map(int, found)) if figure == "pass_at_k" else 1
    candidate = Best(state.step, figure, found[str(k)])
    return candidate if candidate.beats(state.best) else None


def repair(root: Path, known: Best | None) -> None:
    """Let `best` name what a run that goes on knows, which was killed before it did. Of one rank; raises OSError."""
    if known and folders.read_best(root) != known:
        folders.write_best(root, known)


def keep_last(config: Config, state: RunState, metrics: Mapping[str, float]) -> None:
    """After the evaluation at the end, whose weights are saved already: they may be the best. Of one rank.

    What the disk refuses is told; `best` is then the one before.
    """
    root = Path(config.run.dir) / "checkpoints"
    found = new_best(config, state, metrics)
    if not (found and found.step in folders.by_step(root)):
        return
    try:
        folders.write_best(root, found)
        state.best = found
        folders.rotate(root, found.step, config.train.keep_checkpoints)
    except OSError as e:
        print(f"warning: {root / folders.BEST}: cannot be written: {e.strerror}", file=sys.stderr, flush=True)
