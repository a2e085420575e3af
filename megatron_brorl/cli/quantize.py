"""`brorl quantize`: what quantised rollouts would cost, and checkpoints that are quantised once and for all."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError

FORMATS = {"fp8": "FP8_DEFAULT_CFG", "int4": "INT4_AWQ_CFG"}  # ModelOpt's names

_DESCRIPTION = """\
What quantised rollouts would cost, and checkpoints for engines that are quantised once and for all, by ModelOpt
(pip install 'megatron-brorl[quantize]').

    brorl quantize evaluate MODEL PROMPTS.jsonl --format fp8
    brorl quantize export   MODEL PROMPTS.jsonl OUT --format fp8

PROMPTS.jsonl: rows with "prompt", a text; the first --calibrate of them calibrate the scales, all are measured on.
`evaluate` computes with fake-quantised weights and activations and prints how far next-token distributions move.
`export` writes a unified Hugging Face checkpoint. Its activation scales are those of the calibration: for a policy that
is being trained use engine.quantization = "fp8", whose scales come with every weight. TensorRT-LLM was not run on
these files."""


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    quantize = commands.add_parser(
        "quantize",
        help="how far quantised rollouts would move a model's distributions; quantised checkpoints",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = quantize.add_subparsers(required=True, dest="action", metavar="evaluate | export")
    for name, text in [("evaluate", "print how far distributions move"), ("export", "write a quantised checkpoint")]:
        command = actions.add_parser(name, help=text, description=text)
        command.add_argument("model", type=Path, help="Hugging Face directory")
        command.add_argument("prompts", type=Path, help='JSONL rows with "prompt"')
        if name == "export":
            command.add_argument("out", type=Path, help="folder to write")
        command.add_argument("--format", choices=list(FORMATS), default="fp8")
        command.add_argument("--calibrate", type=int, default=32, help="prompts (%(default)s)")
    quantize.set_defaults(command=_quantize)


def _quantize(args: argparse.Namespace) -> int:
    if args.calibrate < 1:
        raise UserError(f"--calibrate {args.calibrate}: must be at least 1")
    from megatron_brorl.checkpoints import quantized

    given = (args.model, args.prompts, FORMATS[args.format], args.calibrate)
    if args.action == "export":
        count = quantized.export(*given, args.out)
        print(f"{args.out}: {args.format}, calibrated on {count} prompts")
    else:
        print(json.dumps({"format": args.format, **asdict(quantized.evaluate(*given))}))
    return 0
