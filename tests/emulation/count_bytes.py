"""Bytes that each kernel loads and stores per element (tools/kernel_audit.py), counted under the emulation, as JSON."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

import torch
from emulation import build
from torch import Tensor

LIBRARY = build.load()
OPS = torch.ops.brorl
N, ROWS, VOCAB = 1 << 16, 16, 1 << 12  # tokens; rows and logits of a row


def moved(tensors: list[Tensor], stored: bool) -> int:
    """Bytes since it was last asked."""
    return sum(LIBRARY.emulation_count(ctypes.c_void_p(x.data_ptr()), stored) for x in tensors)


def bytes_of(call: Callable[[], object], elements: int, *tensors: Tensor) -> list[float]:
    """Bytes per element that `call` loads from, and stores to, the tensors and those that it makes."""
    moved([*tensors], False), moved([*tensors], True)
    results = call()
    made = results if isinstance(results, (list, tuple)) else [results]
    every = [*tensors, *(x for x in made if isinstance(x, Tensor))]
    return [moved(every, False) / elements, moved(every, True) / elements]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(build.DEVICE)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype).to(build.DEVICE)


def counted() -> dict[str, list[float]]:
    found = {}
    x = [random(N) for _ in range(7)]
    mask = ones(N, dtype=torch.bool)

    # Tokens, all of them counted; two segments and 128 groups.
    settings = ("clip", [0.2, 0.28, 0.0], 2.0, 0.1, "k3", 0.1)
    call = lambda: OPS.ppo_tokens(x[0], x[1], x[2], x[3], x[4], x[5], x[6], *settings)  # noqa: E731
    found["tokens_kernel"] = bytes_of(call, N, *x)
    value = (x[0], x[1], x[2], ones(N))
    found["value_loss_kernel"] = bytes_of(lambda: OPS.value_loss(*value, 0.2), N, *value)
    found["moments_kernel"] = bytes_of(lambda: OPS.moments(x[0], mask), N, x[0], mask)
    starts = torch.tensor([0, N // 2, N]).to(build.DEVICE)
    gae = (x[0], x[1], starts, mask, None, 0.99, 0.95, x[2], x[3])
    found["gae_kernel"] = bytes_of(lambda: OPS.gae_(*gae), N, x[0], x[1], mask, x[2], x[3])
    groups = torch.arange(0, N + 1, 512).to(build.DEVICE)
    found["group_kernel"] = bytes_of(lambda: OPS.group_advantages(x[0], groups, mask, True), N, x[0], mask)
    found["whiten_kernel"] = bytes_of(lambda: OPS.whiten_(x[6], 0.0, 1.0, mask), N, x[6], mask)

    # Logits.
    logits, ids = random(ROWS, VOCAB), torch.arange(ROWS).to(build.DEVICE)
    statistics = OPS.softmax_statistics(logits, ids, 0, 1.0)
    found["statistics_kernel"] = bytes_of(lambda: OPS.softmax_statistics(logits, ids, 0, 1.0), ROWS * VOCAB, logits)
    upstream = random(ROWS)
    for name, narrow in (("gradient_kernel", False), ("gradient_kernel, narrow", True)):
        z = random(ROWS, VOCAB)
        gradient = (z, ids, statistics, upstream, upstream, 0, 1.0, narrow)
        found[name] = bytes_of(lambda g=gradient: OPS.softmax_gradient_(*g), ROWS * VOCAB, z)
    wide = random(ROWS, 1 << 15).bfloat16()
    ways = {"": (1.0, 1.0, 0), ", top-k": (1.0, 1.0, 50), ", top-p": (0.17, 0.9, 0), ", top-p, flat": (1.0, 0.9, 0)}
    for name, settings in ways.items():
        draw = (wide, ids, ids, ids, *settings)
        found[f"sample_row{name}"] = bytes_of(lambda d=draw: OPS.sample_tokens(*d), wide.numel(), wide)

    # A decoding step of two kv heads, three query heads on each: rows of 512 tokens; ten rows of a prompt, a tile.
    found["own_kernel"] = decoded(rows=2, own=512, prompt=0, elements=2 * 2 * 512)
    loaded, _ = decoded(rows=10, own=1, prompt=4096, elements=2 * 4096)
    own = 10 * 2 * (16 * 256 + 256) / (2 * 4096)  # of each row a page of keys and a value
    found["prompt_kernel"] = [loaded - own, 0.0]
    return found


def decoded(rows: int, own: int, prompt: int, elements: int) -> list[float]:
    """Bytes of keys and values per element of a step's attention."""
    of_prompt, of_row = -(-prompt // 16), -(-own // 16)
    pages = torch.arange(of_prompt + rows * of_row, dtype=torch.int32)
    cache = [random(len(pages), 2, *shape).bfloat16() for shape in ((128, 16), (16, 128))]
    places = (
        pages[of_prompt:].view(rows, of_row),
        torch.full((rows,), own),
        pages[:of_prompt].view(1, of_prompt),
        torch.tensor([prompt]),
        torch.zeros(rows, dtype=torch.int64),
    )
    step = (
        *(random(rows, 10 * 128).bfloat16(), None, None, 0.0, random(rows, 64), random(rows, 64), *cache),
        *(x.contiguous().to(build.DEVICE) for x in places),
        *(0.1, random(rows, 6 * 128).bfloat16()),
    )
    return bytes_of(lambda: OPS.decode_attention_(*step), elements, *cache)


print(json.dumps(counted()))
