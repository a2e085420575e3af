"""Logits of a Megatron checkpoint and of a Hugging Face directory on the same tokens, each through its own library."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models.gpt import build_actor
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import device, grid
from megatron_brorl.parallel.batch import pack

TOLERANCE = 1e-4  # of the largest logit, or absolute below 1
ROWS, TOKENS = 4, 24


def verify(first: Path, second: Path, shape: ModelShape, target: Path | None = None) -> float:
    """The largest difference of logits in float32 between two checkpoints of either format.

    One model is in memory at a time. Raises UserError where they differ by more than TOLERANCE. target: where `second`
    will stand when it is complete, the path that its user knows.
    """
    a, b = logits(first, shape), logits(second, shape)
    gap, limit = float((a - b).abs().max()), TOLERANCE * max(1.0, float(a.abs().max()))
    if not gap <= limit:
        where = target or second
        raise UserError(f"{where}: its logits differ from those of {first} by {gap:.2e}, more than {limit:.2e}")
    return gap


def logits(directory: Path, shape: ModelShape) -> Tensor:
    """[ROWS * (TOKENS - 1), V] float32 after all tokens but the last of random rows, which V alone decides."""
    length = min(TOKENS, shape.context)
    ids = torch.randint(0, shape.vocab, (ROWS, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = _hugging_face(directory, ids) if (directory / "config.json").is_file() else None
        result = _megatron(directory, shape, ids) if found is None else found
    gc.collect()
    return result


def _hugging_face(directory: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(ids).logits[:, :-1].flatten(0, 1)


def _megatron(directory: Path, shape: ModelShape, ids: Tensor) -> Tensor:
    """Megatron-Core's own loader into its own model, on this process alone."""
    processes = grid.build(ParallelConfig())
    actor = build_actor(shape, processes, torch.float32, backend("fused", device.default_device())).eval()
    with device.bridge():
        state = dist_checkpointing.load({"model": actor.sharded_state_dict(prefix="")}, str(directory))
        actor.load_state_dict(state["model"])
        del state
        (batch,) = pack([row[:1] for row in ids], [row[1:] for row in ids], ids.numel(), 1, False)
        hidden = actor.forward_packed(batch).squeeze(1)[batch.predict.to(device.default_device())]
    found = dict(batch.split((hidden @ actor.head_weight().t())[:, : shape.vocab].cpu()))
    grid.leave()
    return torch.cat([found[row] for row in range(len(ids))])
