"""What rounding the LM head's products to FP8 changes, beside bfloat16: the table of docs/measurements/fp8_head.md.

Usage: python tools/fp8_head_error.py [--rows 512] [--width 1536] [--vocab 16384] [--seed 0] [--model DIR --texts FILE]

Everything is compared with float64 on the float32 matrices: "bf16" rounds both to bfloat16, "fp8" (fp8.head =
"blockwise") rounds these again, by the emulation of a CPU. A GPU sums in another order. Every row is a function of the
seed and of the files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.loss import PolicyTokens
from megatron_brorl.algo.policy_losses import PolicyLossSettings
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.ops.fused import linear as fused
from megatron_brorl.ops.reference import linear as reference
from megatron_brorl.report.comparison import table

CLIP = PolicyLossSettings(eps_low=0.2, eps_high=0.28, is_cap=2.0)
WAYS = {"bf16": False, "fp8": True}


@dataclass(frozen=True)
class Case:
    """Hidden states [R, H] and LM head [V, H] in float32; ids [R] drawn from their softmax."""

    name: str
    hidden: Tensor
    weight: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Line:
    """Of a case by a way; log-probabilities and entropies in nats, gradients as shares of the true one's norm."""

    case: str
    way: str
    entropy: float  # the true one, mean over rows
    log_prob_rms: float
    log_prob_mean: float
    log_prob_largest: float
    beyond_clip: float  # share of rows whose ratio to the true probability the clip range does not hold
    entropy_mean: float
    of_hidden: float  # error of the loss's gradient
    of_weight: float
    cosine: float  # of the head's gradient with the true one


def invented(rows: int, width: int, vocab: int, seed: int) -> Iterator[Case]:
    """Hidden states as a norm leaves them, of size 1 each, and heads with which softmax is flat, and sharp.

    Sharp: each state leans towards one row of the head. Outliers: eight channels of the sharp states are 50 times as
    large, and the head's columns there as much smaller, so that logits are the same.
    """
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g)
    weight = torch.randn(vocab, width, generator=g) / width**0.5
    yield drawn("flat", hidden, weight, g)

    # Its own row's logit is then ln V + 1, where others are about 0.
    target = torch.randint(0, vocab, (rows,), generator=g)
    sharp = hidden + (math.log(vocab) + 1) * weight[target]
    yield drawn("sharp", sharp, weight, g)

    wild = torch.ones(width)
    wild[torch.randperm(width, generator=g)[:8]] = 50
    yield drawn("sharp, outliers", sharp * wild, weight / wild, g)


def drawn(name: str, hidden: Tensor, weight: Tensor, g: torch.Generator) -> Case:
    """With a token for every row from its softmax."""
    ids = torch.multinomial((hidden @ weight.t()).softmax(-1), 1, generator=g).squeeze(-1)
    return Case(name, hidden, weight, ids)


def of_model(directory: Path, texts: Iterable[Tensor], rows: int, seed: int) -> Case:
    """The head of a Hugging Face directory and its states at random places of texts, token ids [1, T] each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        hidden = torch.cat([model.base_model(ids).last_hidden_state[0] for ids in texts])
    picked = torch.randperm(len(hidden), generator=g)[:rows]
    return drawn("trained", hidden[picked], model.get_output_embeddings().weight.detach(), g)


def tokenized(directory: Path, texts: Path) -> Iterator[Tensor]:
    """The token ids [1, T] of a text per line."""
    tokenizer = load_tokenizer(directory)
    for text in texts.read_text(encoding="utf-8").splitlines():
        yield torch.tensor([tokenizer.encode(text)])


def lines(case: Case, seed: int) -> Iterator[Line]:
    """Both ways, against float64."""
    g = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(case.ids), generator=g).double()
    true = _by(reference.linear_log_probs, case, torch.float64)
    truth = _gradients(reference.linear_ppo_loss, case, torch.float64, true[0], advantages)
    for way, fp8 in WAYS.items():
        log_probs, entropy = _by(fused.linear_log_probs, case, torch.bfloat16, fp8=fp8)
        error = log_probs.double() - true[0]
        ratio = error.exp()
        found = _gradients(fused.linear_ppo_loss, case, torch.bfloat16, true[0], advantages, fp8=fp8)
        of_hidden, of_weight = (float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))
        yield Line(
            case.name,
            way,
            float(true[1].mean()),
            float(error.square().mean().sqrt()),
            float(error.mean()),
            float(error.abs().max()),
            float(((ratio < 1 - CLIP.eps_low) | (ratio > 1 + CLIP.eps_high)).double().mean()),
            float((entropy.double() - true[1]).mean()),
            of_hidden,
            of_weight,
            float((found[1] * truth[1]).sum() / (found[1].norm() * truth[1].norm())),
        )


Op = Callable[..., Any]  # of a backend


def _by(op: Op, case: Case, dtype: torch.dtype, **kind: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [R]."""
    with torch.no_grad():
        log_probs, entropy = op(case.hidden.to(dtype), case.weight.to(dtype), case.ids, 1.0, **kind)
    return log_probs, entropy


def _gradients(
    op: Op, case: Case, dtype: torch.dtype, log_probs: Tensor, advantages: Tensor, **kind: bool
) -> list[Tensor]:
    """Of the loss of an update whose rollouts had the true log-probabilities: of both matrices, in float64."""
    matrices = [x.to(dtype, copy=True).requires_grad_() for x in (case.hidden, case.weight)]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    each = torch.full_like(advantages, 1 / len(advantages))
    tokens = PolicyTokens(*(x.to(compute) for x in (log_probs, advantages, each)))
    loss = op(*matrices, case.ids, tokens, CLIP, 1.0, **kind).loss
    return [x.double() for x in torch.autograd.grad(loss, matrices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=1536, help="of invented matrices")
    parser.add_argument("--vocab", type=int, default=16384, help="of invented matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--texts", type=Path, help="a text per line, for --model")
    args = parser.parse_args()
    if (args.model is None) != (args.texts is None):
        parser.error("--model and --texts go together: a model's states are those of texts")

    cases = list(invented(args.rows, args.width, args.vocab, args.seed))
    if args.model:
        cases.append(of_model(args.model, tokenized(args.model, args.texts), args.rows, args.seed))
    head = ["case", "true entropy", "", "log-prob, rms", "mean", "largest", "beyond the clip", "entropy, mean"]
    rows = [[*head, "gradient of hidden", "of the head", "its cosine"]]
    for case in cases:
        for x in lines(case, args.seed):
            errors = (x.log_prob_rms, x.log_prob_mean, x.log_prob_largest)
            told = [*(f"{e:.1e}" for e in errors), f"{x.beyond_clip:.1%}", f"{x.entropy_mean:+.1e}"]
            slopes = [f"{x.of_hidden:.2%}", f"{x.of_weight:.2%}", f"{x.cosine:.5f}"]
            rows.append([x.case, f"{x.entropy:.2f}", x.way, *told, *slopes])
    print(table(rows), end="")


if __name__ == "__main__":
    main()
