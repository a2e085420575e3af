"""`brorl convert`: checkpoints between Hugging Face directories and Megatron distributed checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_brorl.errors import UserError
from megatron_brorl.outputs import check_output, holds

if TYPE_CHECKING:
    from megatron_brorl.model_shape import ModelShape
    from megatron_brorl.progress import Progress

_DESCRIPTION = """\
Convert checkpoints between Hugging Face directories and Megatron distributed checkpoints.

    brorl convert to-megatron HF_DIR CHECKPOINT --tensor 2 --pipeline 2
    brorl convert to-hf CHECKPOINT HF_DIR
    brorl convert to-hf runs/x/checkpoints/step_00000100 HF_DIR --config runs/x/model
    brorl convert to-hf runs/x/checkpoints/best HF_DIR --config runs/x/model           (or latest)
    brorl convert to-megatron CHECKPOINT OTHER --tensor 4 --pipeline 1

In fp32, fp16 or bf16; the types and bits of the weights are kept. One tensor is in memory at a time. The output is
written aside and renamed: where it exists, it is complete. --verify compares the logits of input and output, each
computed by its own library in float32, and takes the memory of one such model. Convert only Megatron checkpoints that
you trust: their index is a pickle. Exit code 0: done; 2: not, with one line that says why."""


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    convert = commands.add_parser(
        "convert",
        help="checkpoints between Hugging Face directories and Megatron's distributed ones",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    directions = convert.add_subparsers(dest="direction", required=True, metavar="to-megatron | to-hf")

    # A Megatron checkpoint is cut as it is asked for; a Hugging Face directory is not.
    text = "from a Hugging Face directory or a Megatron checkpoint of another layout"
    megatron = directions.add_parser("to-megatron", help=text, description=text)
    _add_places(megatron)
    megatron.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks to cut it for (%(default)s)")
    megatron.add_argument("--pipeline", type=int, default=1, help="pipeline stages to cut it for (%(default)s)")

    # What it was cut for makes no difference on the way back.
    text = "from a Megatron checkpoint of any layout"
    _add_places(directions.add_parser("to-hf", help=text, description=text))
    convert.set_defaults(command=_convert)


def _add_places(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path)
    command.add_argument("target", type=Path, help="directory to write")
    command.add_argument(
        "--config", type=Path, help="Hugging Face directory with config.json, for a checkpoint without one"
    )
    command.add_argument("--verify", action="store_true", help="compare the logits of input and output")
    command.add_argument("--overwrite", action="store_true", help="replace the target where it exists")


def _convert(args: argparse.Namespace) -> int:
    try:
        convert(args)
    except KeyboardInterrupt:
        print("brorl: stopped; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def convert(args: argparse.Namespace) -> None:
    """Do what the options of `brorl convert` ask for. Raises UserError before anything is written."""
    from megatron_brorl.checkpoints import convert, folders
    from megatron_brorl.checkpoints.megatron_format import METADATA
    from megatron_brorl.progress import progress

    # What is asked for, as far as it can be told without reading.
    args.source = folders.resolve(args.source)
    _refuse(args)
    to_hf = args.direction == "to-hf"
    layout: tuple[int, ...] = () if to_hf else (args.tensor, args.pipeline)
    if layout and min(layout) < 1:
        raise UserError(f"--tensor {args.tensor} --pipeline {args.pipeline}: must be at least 1")

    # The source says of what kind it is.
    megatron = to_hf or (args.source / METADATA).is_file()
    source, shape, companions = (
        convert.open_megatron(args.source, args.config) if megatron else convert.open_hf(args.source)
    )
    begun = time.monotonic()
    with progress(shape.layers + 2, "convert", True) as p:
        # Checked before it is renamed into its place.
        verification = (lambda written: _verify(args, shape, written, p)) if args.verify else None
        write: Callable[..., int] = convert.to_hf if to_hf else convert.to_megatron
        size = write(source, shape, companions, args.target, *layout, _report(shape.layers + 2, p), verification)
    print(f"{args.target}: {size:,} bytes of weights in {time.monotonic() - begun:.1f} s")


def _refuse(args: argparse.Namespace) -> None:
    """Raise UserError where the target would replace something that is to stay."""
    check_output(args.target, [("the source", args.source), *([("--config", args.config)] if args.config else [])])
    if args.target.exists() and holds(args.source, args.target):
        raise UserError(f"{args.target}: is a part of the source, {args.source}; name another place to write to")
    if args.target.exists() and not args.overwrite:
        raise UserError(f"{args.target}: exists; give another target or --overwrite")


def _report(steps: int, p: Progress) -> Callable[[int, int, str], None]:
    """Tells one step per layer, and one each before and after them."""
    seen: set[str] = set()

    def report(done: int, total: int, name: str) -> None:
        step = ".".join(name.split(".")[:3]) if name.startswith("decoder.layers.") else "ends"
        if step not in seen or done == total:
            seen.add(step)
            p.update(steps if done == total else len(seen), {"tensor": name})

    return report


def _verify(args: argparse.Namespace, shape: ModelShape, written: Path, p: Progress) -> None:
    """Raise UserError unless what was written has the logits of the source."""
    from megatron_brorl.checkpoints.convert import verify

    gap = verify(args.source, written, shape, args.target)
    p.note(f"{args.target}: logits equal those of {args.source} within {gap:.2e}")
