#!/usr/bin/env python3
"""Time and extra peak memory of drawing the next token: the op of csrc/, its reference, and torch.multinomial.

    python benchmarks/bench_sampler.py [--quick] [--json FILE] [--threads N] [--repeat N]

Every table row is one draw for 512 rows of float32 logits over V tokens. The implementations of one setting take turns
in one process: the median of the seconds, after one call each that warms up and shows the growth of the resident set at
its peak. "read" is torch.sum over the same logits, the least that a draw can cost. Linux with glibc only.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_common import alone, options, write_rows
from measure import timed
from torch import Tensor

from megatron_brorl.ops.fused import sampling as fused_sampling
from megatron_brorl.ops.reference import sampling

ROWS = 512
VOCABULARIES = (4096, 32000, 151936)
SETTINGS: dict[str, tuple[float, int]] = {"": (1.0, 0), " top_p=0.95": (0.95, 0), " top_k=50": (1.0, 50)}


def implementations(top_p: float, top_k: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def multinomial(logits: Tensor, *_: Tensor) -> Tensor:
        plain = top_p == 1 and not top_k
        p = logits.softmax(-1) if plain else sampling.sampling_log_probs(logits, 1.0, top_p, top_k).exp()
        return torch.multinomial(p, 1)

    def keyed(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda logits, keys, index: op(logits, keys, index, index, 1.0, top_p, top_k)[0]

    return {
        "fused": keyed(fused_sampling.sample_tokens),
        "reference": keyed(sampling.sample_tokens),
        "multinomial": multinomial,
        "read": lambda logits, *_: logits.sum(-1),
    }


def measure(args: tuple[str, int, int, int]) -> list[dict[str, Any]]:
    """The rows of one setting and vocabulary, to be called in a fresh process."""
    setting, vocab, threads, repeat = args
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logits = 2 * torch.randn(ROWS, vocab)
    inputs = (logits, torch.full((ROWS,), 7), torch.arange(ROWS))
    calls = implementations(*SETTINGS[setting])

    # In turns; the first round measures memory, the others time.
    libc = ctypes.CDLL("libc.so.6")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    extra = dict.fromkeys(calls, 0)
    for i in range(1 + repeat):
        for name, call in calls.items():
            if not i:
                libc.malloc_trim(0)  # so that no implementation grows into what another has left
            elapsed, grown = timed(partial(call, *inputs))[:2]
            if i:
                seconds[name].append(elapsed)
            else:
                extra[name] = grown
    return [
        {
            "op": f"sample_tokens{setting}",
            "impl": name,
            "dtype": "fp32",
            "T": ROWS,
            "H": None,
            "V": vocab,
            "threads": threads,
            "seconds": statistics.median(seconds[name]),
            "extra_mib": extra[name] / 1024,
            "gemm_peak_share": None,
        }
        for name in calls
    ]


def main() -> None:
    args = options(__doc__, "the smaller vocabularies alone", 5, "timed calls per row").parse_args()
    found = []
    print("op                          impl              V  milliseconds  of fused  extra MiB")
    for vocab in VOCABULARIES[:2] if args.quick else VOCABULARIES:
        for setting in SETTINGS:
            batch = alone(measure, setting, vocab, args.threads, args.repeat)
            found += batch
            for r in batch:
                print(
                    f"{r['op']:<28}{r['impl']:<12}{r['V']:>7}{1000 * r['seconds']:>14.2f}"
                    f"{r['seconds'] / batch[0]['seconds']:>10.2f}{r['extra_mib']:>11.0f}"
                )
    write_rows(args.json, found)


if __name__ == "__main__":
    main()
