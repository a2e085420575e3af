"""One small case of every kernel of csrc, for compute-sanitizer: python kernel_cases.py cuda

Sizes leave a rest over blocks and warps. Each says its name first, so that the last one said is the one that ended it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

import torch  # noqa: E402
from bench_ops import fused, make_inputs  # noqa: E402
from bench_sampler import SETTINGS, implementations  # noqa: E402

from gpu_stages import decoding  # noqa: E402
from megatron_brorl.ops.backend import backend  # noqa: E402

SHAPE = (70, 33, 1031)  # T, H, V
ATTENTION = (7, 6, 2, 48, 530, 21)  # as decoding.SIZES; two chunks of a prompt, heads that tensor cores take in bf16


def cases(device: str) -> dict[str, Callable[[], Any]]:
    """By name: the loss in each dtype, ops over tokens, the sampler with every setting, a decoding step's attention."""
    found: dict[str, Callable[[], Any]] = {}
    for dtype in ("fp32", "bf16"):
        inputs = make_inputs(dtype, SHAPE, 0.4, device)[0]
        found[f"linear_ppo_loss {dtype}"] = lambda inputs=inputs: fused(*inputs)  # type: ignore[misc]

    logits = torch.randn(5, 1031, device=device)
    keys, index = torch.full((5,), 7, device=device), torch.arange(5, device=device)
    for setting, (top_p, top_k) in SETTINGS.items():
        draw = implementations(top_p, top_k)["fused"]
        found[f"sample_tokens{setting}"] = lambda draw=draw: draw(logits, keys, index)  # type: ignore[misc]

    ops = backend("fused", torch.device(device)).decode
    for of_pages in (torch.float32, torch.bfloat16):
        step = decoding.step(device, of_pages, ATTENTION)
        found[f"decode attention {of_pages}"] = lambda step=step: step(ops)  # type: ignore[misc]
    return found


def main() -> None:
    device = sys.argv[1]
    for name, call in cases(device).items():
        print(f"case {name}", flush=True)
        call()
        if device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
