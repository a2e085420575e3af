"""Measure the effect of quantized rollouts, and export quantized checkpoints, by ModelOpt."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.data.chat import prompt_text
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError


@dataclass(frozen=True)
class DistributionShift:
    """Change of next-token distributions over all positions of the prompts, in nats."""

    tokens: int
    kl_mean: float  # KL(original || quantized)
    kl_max: float
    gap_mean: float  # mean |log-prob difference| of the prompts' tokens
    top_agrees: float  # share of positions whose most likely token is the same


def distribution_shift(
    original: Sequence[Tensor], quantized: Sequence[Tensor], targets: Sequence[Tensor]
) -> DistributionShift:
    """Compare the logits [T, V] of each text under two models. targets: the next token [T] of each position."""
    kl = []
    gap = []
    agrees = []
    for original_logits, quantized_logits, ids in zip(original, quantized, targets, strict=True):
        p, q = (logits.double().log_softmax(-1) for logits in (original_logits, quantized_logits))
        kl.append((p.exp() * (p - q)).sum(-1))
        gap.append((p - q).gather(-1, ids[:, None])[:, 0].abs())
        agrees.append((original_logits.argmax(-1) == quantized_logits.argmax(-1)).double())
    all_kl = torch.cat(kl)
    kl_mean, gap_mean, top_agrees = (float(torch.cat(x).mean()) for x in (kl, gap, agrees))
    return DistributionShift(len(all_kl), kl_mean, float(all_kl.max()), gap_mean, top_agrees)


def evaluate(model: Path, prompts: Path, preset: str, calibrate: int) -> DistributionShift:
    """Compare a model with itself under fake-quantized weights and activations, on every row of `prompts`.

    preset: a configuration of modelopt.torch.quantization. The first `calibrate` rows set the scales. Raises UserError.
    """
    loaded, texts = _opened(model, prompts)
    with torch.inference_mode():
        original = [loaded(ids[None]).logits[0, :-1] for ids in texts]
        _quantize(loaded, preset, texts[:calibrate])
        quantized = [loaded(ids[None]).logits[0, :-1] for ids in texts]
    return distribution_shift(original, quantized, [ids[1:] for ids in texts])


def export(model: Path, prompts: Path, preset: str, calibrate: int, out: Path) -> int:
    """Write a unified Hugging Face checkpoint to `out`, and return the number of rows that calibrated it.

    Raises UserError if `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists; name a folder that does not")
    loaded, texts = _opened(model, prompts)
    with torch.inference_mode():
        _quantize(loaded, preset, texts[:calibrate])
        aside = out.with_name(f".{out.name}.writing")
        _modelopt("export").export_hf_checkpoint(loaded, export_dir=str(aside))
    for file in model.glob("token*"):
        (aside / file.name).write_bytes(file.read_bytes())
    aside.rename(out)
    return len(texts[:calibrate])


def _modelopt(part: str) -> Any:
    """Return modelopt.torch.quantization or modelopt.torch.export."""
    try:
        return importlib.import_module(f"modelopt.torch.{part}")
    except ImportError as e:
        raise UserError(f"ModelOpt cannot be imported ({e}): pip install 'megatron-brorl[quantize]'") from e


def _quantize(model: Any, preset: str, calibration: Sequence[Tensor]) -> None:
    """Insert fake quantizers into a transformers model; the texts [T] calibrate their scales."""
    quantization = _modelopt("quantization")

    def forward(m: Any) -> None:
        for ids in calibration:
            m(ids[None])

    quantization.quantize(model, copy.deepcopy(getattr(quantization, preset)), forward_loop=forward)


def _opened(model: Path, prompts: Path) -> tuple[Any, list[Tensor]]:
    """Return the transformers model of a directory, and the ids [T] of each row."""
    from transformers import AutoModelForCausalLM

    _modelopt("quantization")  # fail early if it is missing
    rows = read_rows(prompts)
    tokenizer = load_tokenizer(model)
    texts = [torch.tensor(tokenizer.encode(prompt_text(row.prompt))) for row in rows]
    if not texts or min(map(len, texts)) < 2:
        raise UserError(f"{prompts}: every prompt must have two tokens or more")
    return AutoModelForCausalLM.from_pretrained(model).eval(), texts
