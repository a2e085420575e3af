#!/usr/bin/env python3
"""The mask of a packed stream for FlexAttention: by arithmetic on segments, and by create_block_mask over T^2 pairs.

    python benchmarks/bench_mask.py [--quick] [--json FILE]

Streams of prompts of 200 tokens, each with siblings of 512 to 8,192 tokens. Seconds and peak memory of one call each,
on the GPU where there is one (its memory then), and whether both masks are the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_common import write_rows
from measure import timed
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from megatron_brorl.models.layers.block_mask import block_mask
from megatron_brorl.parallel import device
from megatron_brorl.parallel.batch import Group


def stream(tokens: int) -> tuple[Group, ...]:
    """Groups of about so many tokens, siblings from short to long."""
    groups, left, length = [], tokens, 512
    while left >= 200 + length:
        count = min(4, (left - 200) // length)
        groups.append(Group(200, ((count, length),)))
        left -= 200 + count * length
        length = min(2 * length, 8192) if left >= 200 + 2 * length else length
    return (*groups, Group(0, ((1, left),))) if left else tuple(groups)


def measured(call: Callable[[], BlockMask], where: torch.device) -> tuple[float, float, BlockMask]:
    """(seconds, MiB at the peak beyond what was in use, mask)."""
    if where.type != "cuda":
        seconds, kib, mask = timed(call)
        return seconds, kib / 1024, mask
    call()  # kernels are loaded at their first use
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    used, begun = torch.cuda.memory_allocated(), time.perf_counter()
    mask = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun, (torch.cuda.max_memory_allocated() - used) / 2**20, mask


def measure(tokens: int) -> dict[str, Any]:
    """One row of the table."""
    groups, where = stream(tokens), device.default_device()
    seconds, mib, ours = measured(lambda: block_mask(groups, where), where)
    by_pairs, pairs_mib, theirs = measured(
        lambda: create_block_mask(ours.mask_mod, None, None, tokens, tokens, device=str(where)), where
    )
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    same = all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in names)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "mib": mib,
        "create_block_mask_seconds": by_pairs,
        "create_block_mask_mib": pairs_mib,
        "same": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 8,192 tokens alone")
    parser.add_argument("--json", type=Path, help="write the rows here as a JSON list")
    args = parser.parse_args()

    print("  tokens   arithmetic         MiB   create_block_mask         MiB   ratio  same")
    rows = []
    for tokens in (4096, 8192) if args.quick else (4096, 8192, 16384, 32768):
        r = measure(tokens)
        rows.append(r)
        pairs = r["create_block_mask_seconds"]
        print(
            f"{tokens:>8}{1e3 * r['seconds']:>10.1f} ms{r['mib']:>12.1f}{1e3 * pairs:>17.1f} ms"
            f"{r['create_block_mask_mib']:>12.1f}{pairs / r['seconds']:>8.0f}  {r['same']}"
        )
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
