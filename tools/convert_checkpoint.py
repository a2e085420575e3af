#!/usr/bin/env python3
"""Convert checkpoints between Hugging Face directories and Megatron distributed checkpoints.

    python tools/convert_checkpoint.py to-megatron HF_DIR CHECKPOINT --tensor 2 --pipeline 2
    python tools/convert_checkpoint.py to-hf CHECKPOINT HF_DIR
    python tools/convert_checkpoint.py to-hf runs/x/checkpoints/step_00000100 HF_DIR --config runs/x/model
    python tools/convert_checkpoint.py to-megatron CHECKPOINT OTHER --tensor 4 --pipeline 1

Dense Llama, Qwen2 and Qwen3 in fp32, fp16 or bf16; the types and bits of the weights are kept. One tensor is in memory
at a time. The output is written aside and renamed: where it exists, it is complete. --verify compares the logits of
input and output, each computed by its own library in float32, and takes the memory of one such model. Convert only
Megatron checkpoints that you trust: their index is a pickle. Exit code 0: done; 2: not, with one line that says why.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from megatron_brorl.errors import UserError
from megatron_brorl.outputs import check_output, holds
from megatron_brorl.progress import progress


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="to-megatron | to-hf")
    for name, text in [
        ("to-megatron", "from a Hugging Face directory or a Megatron checkpoint of another layout"),
        ("to-hf", "from a Megatron checkpoint of any layout"),
    ]:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path, help="directory to write")
        if name == "to-megatron":
            command.add_argument(
                "--tensor", type=int, default=1, help="tensor-parallel ranks to cut it for (%(default)s)"
            )
            command.add_argument("--pipeline", type=int, default=1, help="pipeline stages to cut it for (%(default)s)")
        command.add_argument(
            "--config", type=Path, help="Hugging Face directory with config.json, for a checkpoint without one"
        )
        command.add_argument("--verify", action="store_true", help="compare the logits of input and output")
        command.add_argument("--overwrite", action="store_true", help="replace the target where it exists")
    return parser


def run(args: argparse.Namespace) -> None:
    from megatron_brorl.checkpoints import convert
    from megatron_brorl.checkpoints.megatron_format import METADATA

    check_output(args.target, [("the source", args.source), *([("--config", args.config)] if args.config else [])])
    if args.target.exists() and holds(args.source, args.target):
        raise UserError(f"{args.target}: is a part of the source, {args.source}; name another place to write to")
    if args.target.exists() and not args.overwrite:
        raise UserError(f"{args.target}: exists; give another target or --overwrite")
    megatron = args.command == "to-hf" or (args.source / METADATA).is_file()
    opened = convert.open_megatron(args.source, args.config) if megatron else convert.open_hf(args.source)
    source, shape, companions = opened
    begun = time.monotonic()
    with progress(shape.layers + 2, "convert", True) as p:
        seen: set[str] = set()

        def report(done: int, total: int, name: str) -> None:
            """One step per layer, and one each before and after them."""
            step = ".".join(name.split(".")[:3]) if name.startswith("decoder.layers.") else "ends"
            if step not in seen or done == total:
                seen.add(step)
                p.update(shape.layers + 2 if done == total else len(seen), {"tensor": name})

        def check(written: Path) -> None:
            from megatron_brorl.checkpoints.compare import verify

            gap = verify(args.source, written, shape, args.target)
            p.note(f"{args.target}: logits equal those of {args.source} within {gap:.2e}")

        verification = check if args.verify else None
        if args.command == "to-hf":
            size = convert.to_hf(source, shape, companions, args.target, report, verification)
        else:
            if min(args.tensor, args.pipeline) < 1:
                raise UserError(f"--tensor {args.tensor} --pipeline {args.pipeline}: must be at least 1")
            layout = (args.tensor, args.pipeline)
            size = convert.to_megatron(source, shape, companions, args.target, *layout, report, verification)
    seconds = time.monotonic() - begun
    print(f"{args.target}: {size:,} bytes of weights in {seconds:.1f} s")


def main() -> None:
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    try:
        run(_parser().parse_args())
    except UserError as e:
        print(f"convert_checkpoint: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("convert_checkpoint: stopped; nothing was left behind", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
