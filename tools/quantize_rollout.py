"""What quantised rollouts would cost, and checkpoints for engines that are quantised once and for all, by ModelOpt.

python tools/quantize_rollout.py evaluate MODEL PROMPTS.jsonl --format fp8
python tools/quantize_rollout.py export   MODEL PROMPTS.jsonl OUT --format fp8

PROMPTS.jsonl: rows with "prompt", a text; the first --calibrate of them calibrate the scales, all are measured on.
`evaluate` computes with fake-quantised weights and activations and prints how far next-token distributions move.
`export` writes a unified Hugging Face checkpoint. Its activation scales are those of the calibration: for a policy that
is being trained use trtllm.quantization = "fp8_block", whose scales come with every weight. TensorRT-LLM was not run on
these files.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.data.chat import spoken
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

FORMATS = {"fp8": "FP8_DEFAULT_CFG", "int4": "INT4_AWQ_CFG"}


@dataclass(frozen=True)
class Shift:
    """How far next-token distributions move, over all positions of the prompts. Nats."""

    tokens: int
    kl_mean: float  # KL(original || quantised)
    kl_max: float
    gap_mean: float  # |log-prob difference| of the tokens that stand there
    top_agrees: float  # share of positions whose most likely token stays


def shift(original: Sequence[Tensor], quantised: Sequence[Tensor], targets: Sequence[Tensor]) -> Shift:
    """logits [T, V] of each text under both models, and the tokens [T] that follow each position."""
    kl, gap, agrees = [], [], []
    for a, b, ids in zip(original, quantised, targets, strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        gap.append((p - q).gather(-1, ids[:, None])[:, 0].abs())
        agrees.append((a.argmax(-1) == b.argmax(-1)).double())
    every = torch.cat(kl)
    means = (float(torch.cat(x).mean()) for x in (kl, gap, agrees))
    mean, gap_mean, top = means
    return Shift(len(every), mean, float(every.max()), gap_mean, top)


def quantise(model: Any, form: str, calibration: Sequence[Tensor]) -> None:
    """Put fake quantisers into a transformers model, in place; scales come from a pass over the texts [T]."""
    import modelopt.torch.quantization as mtq

    def forward(m: Any) -> None:
        for ids in calibration:
            m(ids[None])

    mtq.quantize(model, copy.deepcopy(getattr(mtq, FORMATS[form])), forward_loop=forward)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    texts = _texts(args.model, args.prompts)
    with torch.inference_mode():
        if args.command == "export":
            _export(model, args, texts)
            return
        original = [model(ids[None]).logits[0, :-1] for ids in texts]
        quantise(model, args.format, texts[: args.calibrate])
        quantised = [model(ids[None]).logits[0, :-1] for ids in texts]
    print(json.dumps({"format": args.format, **asdict(shift(original, quantised, [ids[1:] for ids in texts]))}))


def _export(model: Any, args: argparse.Namespace, texts: Sequence[Tensor]) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    if args.out.exists():
        raise UserError(f"{args.out}: exists; name a folder that does not")
    quantise(model, args.format, texts[: args.calibrate])
    aside = args.out.with_name(f".{args.out.name}.writing")
    export_hf_checkpoint(model, export_dir=str(aside))
    for file in Path(args.model).glob("token*"):
        (aside / file.name).write_bytes(file.read_bytes())
    aside.rename(args.out)
    print(f"{args.out}: {args.format}, calibrated on {len(texts[: args.calibrate])} prompts")


def _texts(model: Path, prompts: Path) -> list[Tensor]:
    rows, _ = read_rows(prompts, False)
    tokenizer = load_tokenizer(model)
    found = [torch.tensor(tokenizer.encode(spoken(row.prompt))) for row in rows]
    if not found or min(map(len, found)) < 2:
        raise UserError(f"{prompts}: every prompt must have two tokens or more")
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("evaluate", "export"):
        command = commands.add_parser(name)
        command.add_argument("model", type=Path, help="Hugging Face directory")
        command.add_argument("prompts", type=Path, help='JSONL rows with "prompt"')
        if name == "export":
            command.add_argument("out", type=Path, help="folder to write")
        command.add_argument("--format", choices=list(FORMATS), default="fp8")
        command.add_argument("--calibrate", type=int, default=32, help="prompts (%(default)s)")
    args = parser.parse_args(arguments)
    if args.calibrate < 1:
        parser.error("--calibrate must be at least 1")
    return args


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(f"quantize_rollout: {e}", file=sys.stderr)
        sys.exit(2)
