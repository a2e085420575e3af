"""`brorl convert`: convert checkpoints between formats and layouts; `brorl quantize`: quantize a model by ModelOpt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_brorl.errors import UserError
from megatron_brorl.files import check_output, contains

if TYPE_CHECKING:
    from megatron_brorl.families.shape import ModelShape

FORMATS = {"fp8": "FP8_DEFAULT_CFG", "int4": "INT4_AWQ_CFG"}  # name here -> name of ModelOpt's configuration

_CONVERT = """\
Convert checkpoints between Hugging Face directories and Megatron distributed checkpoints.

    brorl convert to-megatron HF_DIR CHECKPOINT --tensor 2 --pipeline 2
    brorl convert to-hf CHECKPOINT HF_DIR
    brorl convert to-hf runs/x/checkpoints/best HF_DIR --config runs/x/model   (or .../latest, .../step_00000100)
    brorl convert to-megatron CHECKPOINT OTHER --tensor 4 --pipeline 1
    brorl convert to-peft runs/x/checkpoints/best PEFT_DIR --config BASE   (adapters of a run with lora.rank)

Weights in fp32, fp16 or bf16 keep their types and bits; one tensor is in memory at a time. The output is written aside
and renamed: if it exists, it is complete. --verify compares the float32 logits of input and output, each computed by
its own library, and needs the memory of one such model. Convert only Megatron checkpoints that you trust: the format
contains pickles."""

_QUANTIZE = """\
Quantize a model by ModelOpt (pip install 'megatron-brorl[quantize]').

    brorl quantize evaluate MODEL PROMPTS.jsonl --format fp8
    brorl quantize export   MODEL PROMPTS.jsonl OUT --format fp8

PROMPTS.jsonl: rows with "prompt", a text; the first --calibrate of them calibrate the scales.
`evaluate` computes with fake-quantized weights and activations, and prints the change of next-token distributions.
`export` writes a unified Hugging Face checkpoint. Its activation scales are fixed: for a policy that is being trained
set engine.quantization = "fp8", whose scales are sent with the weights. TensorRT-LLM was not run on these files."""


def add_commands(commands: Any) -> None:
    converter = commands.add_parser(
        "convert",
        help="convert checkpoints between Hugging Face's and Megatron's distributed format",
        description=_CONVERT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    directions = converter.add_subparsers(dest="direction", required=True, metavar="to-megatron | to-hf | to-peft")
    conversions = {
        "to-megatron": "a Hugging Face directory, or a Megatron checkpoint of another layout, to a Megatron checkpoint",
        "to-hf": "a Megatron checkpoint of any layout to a Hugging Face directory, with a run's adapters merged",
        "to-peft": "the adapters in a checkpoint of a run to a PEFT directory",
    }
    for name, description in conversions.items():
        text = f"convert {description}"
        command = directions.add_parser(name, help=text, description=text)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path, help="directory to write")
        text = "Hugging Face directory with config.json and tokenizer, or the base model of adapters"
        command.add_argument("--config", type=Path, help=f"{text}; needed for a checkpoint of a run")
        if name != "to-peft":
            command.add_argument("--verify", action="store_true", help="compare the logits of input and output")
        command.add_argument("--overwrite", action="store_true", help="replace an existing target")
        if name == "to-megatron":
            command.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
            command.add_argument("--pipeline", type=int, default=1, help="pipeline stages (%(default)s)")
    converter.set_defaults(command=convert, verify=False)

    quantize = commands.add_parser(
        "quantize",
        help="measure the effect of quantized rollouts, or write a quantized checkpoint",
        description=_QUANTIZE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = quantize.add_subparsers(required=True, dest="action", metavar="evaluate | export")
    for name, text in (
        ("evaluate", "print how much quantization changes the next-token distributions"),
        ("export", "write a quantized checkpoint"),
    ):
        command = actions.add_parser(name, help=text, description=text)
        command.add_argument("model", type=Path, help="Hugging Face directory")
        command.add_argument("prompts", type=Path, help='JSONL rows with "prompt"')
        if name == "export":
            command.add_argument("out", type=Path, help="folder to write")
        command.add_argument("--format", choices=list(FORMATS), default="fp8")
        text = "number of prompts that calibrate the scales (%(default)s)"
        command.add_argument("--calibrate", type=int, default=32, help=text)
    quantize.set_defaults(command=_quantize)


def convert(args: argparse.Namespace) -> int:
    """Carry out `brorl convert`, and return 0. Raises UserError."""
    from megatron_brorl.checkpoints import convert, folders
    from megatron_brorl.checkpoints.megatron_format import parameter_entries
    from megatron_brorl.tracking.progress import progress

    args.source = folders.resolve(args.source)
    check_output(args.target, [("the source", args.source), *([("--config", args.config)] if args.config else [])])
    if args.target.exists() and contains(args.source, args.target):
        raise UserError(f"{args.target}: is part of the source, {args.source}; give another target")
    if args.target.exists() and not args.overwrite:
        raise UserError(f"{args.target}: exists; give another target or --overwrite")
    if args.direction == "to-megatron" and min(args.tensor, args.pipeline) < 1:
        raise UserError(f"--tensor {args.tensor} --pipeline {args.pipeline}: must be at least 1")
    source, shape, companions = _open(args)
    begun = time.monotonic()
    tensors = len(source.entries if args.direction == "to-peft" else parameter_entries(shape))
    with progress(tensors, "convert") as p:

        def report(done: int, name: str) -> None:
            if 20 * done // tensors > 20 * (done - 1) // tensors:  # at every 5%
                p.update(done, {"tensor": name})

        def verify(written: Path) -> None:
            merged = source if isinstance(source, convert.MergedCheckpoint) else None
            gap = convert.verify(args.source, written, shape, args.target, merged)
            p.note(f"{args.target}: logits equal those of {args.source} within {gap:.2e}")

        check = verify if args.verify else None
        if args.direction == "to-peft":
            size = convert.to_peft(source, companions, args.target, report)
        elif args.direction == "to-hf":
            size = convert.to_hf(source, shape, companions, args.target, report, check)
        else:
            layout = {"tensor": args.tensor, "pipeline": args.pipeline}
            size = convert.to_megatron(source, shape, companions, args.target, **layout, report=report, check=check)
    print(f"{args.target}: {size:,} bytes of weights in {time.monotonic() - begun:.1f} s")
    return 0


def _open(args: argparse.Namespace) -> tuple[Any, ModelShape, Path]:
    """Return the source, its shape, and the folder of config.json and tokenizer. Raises UserError."""
    from megatron_brorl.checkpoints import convert
    from megatron_brorl.checkpoints.megatron_format import METADATA

    if args.direction == "to-megatron" and not (args.source / METADATA).is_file():
        return convert.open_hf(args.source)
    opened = convert.open_megatron(args.source, args.config)
    has_adapters = isinstance(opened[0], convert.MergedCheckpoint)
    if has_adapters and args.direction == "to-megatron":
        raise UserError(f"{args.source}: holds only adapters: convert to-hf with --config, and the result to-megatron")
    if not has_adapters and args.direction == "to-peft":
        raise UserError(f"{args.source}: has no adapters, because lora.rank was 0 in its run: convert to-hf")
    return opened


def _quantize(args: argparse.Namespace) -> int:
    if args.calibrate < 1:
        raise UserError(f"--calibrate {args.calibrate}: must be at least 1")
    from megatron_brorl.checkpoints import quantized

    arguments = (args.model, args.prompts, FORMATS[args.format], args.calibrate)
    if args.action == "export":
        count = quantized.export(*arguments, args.out)
        print(f"{args.out}: {args.format}, calibrated on {count} prompts")
    else:
        print(json.dumps({"format": args.format, **dataclasses.asdict(quantized.evaluate(*arguments))}))
    return 0
