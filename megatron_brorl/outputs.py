"""What a command writes may not be what it reads: told before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_brorl.config.rules import named
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError

_TRAINED = "model .model.writing .model.old tensorboard wandb mlflow.db .trackers.json metrics.jsonl"
WRITTEN = {  # in run.dir, by command
    "train": f"{_TRAINED} checkpoints engines rollouts summary.json curves.png theory.png run.json",
    "sft": _TRAINED,
    "evaluate": "engines evaluation.json evaluation.jsonl evaluation.md evaluation.png",
}


def check_outputs(config: Config, command: str, where: str) -> None:
    """Raise UserError where `command` (a key of WRITTEN) would write over the model, the data or `where`, its TOML.

    Links and relative paths are followed. A model in run.dir/model may be evaluated, but not trained into itself.
    """
    read: list[tuple[str, Sequence[str]]] = [
        ("the configuration", [where]),
        ("model.path", [config.model.path]),
        ("data.train", config.data.train),
        *((f"data.mixture[{i}].files", source.files) for i, source in enumerate(config.data.mixture)),
    ]
    benchmarks = [named(benchmark)[1] for benchmark in config.evaluate.benchmarks]
    read += [("data.held_out", config.data.held_out), ("evaluate.benchmarks", benchmarks)]
    inputs = {f"{key} = {path!r}": Path(path) for key, paths in read for path in paths if path}
    for name in WRITTEN[command].split():
        output = Path(config.run.dir) / name
        for what, path in inputs.items():
            if holds(output, path):
                raise UserError(
                    f"{where}: run.dir = {config.run.dir!r}: `brorl {command}` writes {output}, which would replace "
                    f"{what}; choose another run.dir"
                )


def check_output(output: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Raise UserError where writing `output`, a file or a whole folder, would replace an input (name, path)."""
    for name, path in inputs:
        if holds(output, path):
            raise UserError(f"{output}: would replace {name}, {path}; name another place to write to")


def holds(output: Path, path: Path) -> bool:
    """Whether `output` is `path` or a folder around it, however either is spelled, linked or mounted."""
    real, target = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    return any(part == target or _same(part, target) for part in (real, *real.parents))


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:  # one of them is not there
        return False
