"""Read JSON, hash files, write files atomically, and refuse to overwrite inputs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.config.rules import parse_benchmark
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError, shown

_TRAINED = "model .model.writing .model.old tensorboard wandb mlflow.db .trackers.json metrics.jsonl"
WRITTEN = {  # files and folders that each command writes to run.dir
    "train": f"{_TRAINED} checkpoints engines rollouts summary.json curves.png run.json",
    "sft": _TRAINED,
    "evaluate": "engines evaluation.json evaluation.jsonl evaluation.md evaluation.png",
}


def read_object(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError, which ends with the remedy, if there is none.

    Raises OSError if the disk or permissions fail, because then nothing is known about the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON: {shown(e)}; {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object; {remedy}")
    return content


def sha256(*paths: Path) -> str:
    """Return the SHA-256 of files, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` when the block ends. An error leaves no file behind.

    Raises UserError if the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        aside.replace(path)
    except OSError as e:
        reason = f"cannot be written: {e.strerror}; make it writable or choose another place"
        raise UserError(f"{path.absolute()}: {reason}") from None
    finally:
        with contextlib.suppress(OSError):  # the folder may not exist
            aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises UserError if that is not possible."""
    with writing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, with null for numbers that are not finite, as in metrics.jsonl."""
    write_text(path, json.dumps(nonfinite_to_none(value), indent=2, allow_nan=False) + "\n")


def nonfinite_to_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nonfinite_to_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [nonfinite_to_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rename_aside(path: Path) -> Path:
    """Rename a file or folder to the first free of name.1.suffix, name.2.suffix, ... Raises OSError."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists() or aside.is_symlink():
        number += 1
    return path.rename(aside)


def check_outputs(config: Config, command: str, where: str) -> None:
    """Raise UserError if `command` (a key of WRITTEN) would overwrite the model, the data or `where`, its TOML file.

    Links are followed. A model in run.dir/model may be evaluated, but not trained into itself.
    """
    paths_by_key: list[tuple[str, Sequence[str]]] = [
        ("the configuration", [where]),
        ("model.path", [config.model.path]),
        ("data.train", config.data.train),
        *((f"data.mixture[{i}].files", source.files) for i, source in enumerate(config.data.mixture)),
    ]
    benchmarks = [parse_benchmark(benchmark)[1] for benchmark in config.evaluate.benchmarks]
    paths_by_key += [("data.held_out", config.data.held_out), ("evaluate.benchmarks", benchmarks)]
    inputs = {f"{key} = {path!r}": Path(path) for key, paths in paths_by_key for path in paths if path}
    for name in WRITTEN[command].split():
        output = Path(config.run.dir) / name
        for what, path in inputs.items():
            if contains(output, path):
                raise UserError(
                    f"{where}: run.dir = {config.run.dir!r}: `brorl {command}` writes {output}, which would replace "
                    f"{what}; choose another run.dir"
                )


def check_output(output: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Raise UserError if writing `output`, a file or a folder, would replace an input (name, path)."""
    for name, path in inputs:
        if contains(output, path):
            raise UserError(f"{output}: would replace {name}, {path}; name another place to write to")


def contains(output: Path, path: Path) -> bool:
    """Return whether `output` is `path` or a folder that contains it, after following links and mounts."""
    real_path, real_output = Path(os.path.realpath(path)), Path(os.path.realpath(output))
    return any(part == real_output or _same(part, real_output) for part in (real_path, *real_path.parents))


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False
