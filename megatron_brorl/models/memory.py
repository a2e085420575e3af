"""What training needs of a GPU's memory at least, known before anything is built."""

from __future__ import annotations

import math

import torch

from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models.hf_names import entries
from megatron_brorl.parallel import device
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.layout import local_shape


def training_bytes(
    shape: ModelShape, stage: int, tensor: int, pipeline: int, dtype: torch.dtype, shards: int = 1
) -> int:
    """Bytes of weights, fp32 gradients, Adam's moments and, beside weights that are no fp32, fp32 masters on a rank.

    stage: of the pipeline. shards: ranks that moments and masters are cut over (ZeRO-1; Rajbhandari et al. 2020,
    section 5.1); 1: each has all. Activations come on top.
    """
    table = entries(shape, pipeline)
    count = sum(math.prod(local_shape(e, tensor)) for e in table if e.stage == stage)
    if shape.tied and stage == pipeline - 1 > 0:
        count += math.prod(local_shape(table[0], tensor))  # the last stage's copy of the embedding
    masters = 0 if dtype == torch.float32 else 4
    return count * (dtype.itemsize + 4) + count * (8 + masters) // shards


def check(shape: ModelShape, grid: Grid, dtype: torch.dtype, distributed_optimizer: bool) -> None:
    """Raise UserError where a model of this shape cannot be trained on this rank's GPU."""
    if not device.on_gpu():
        return
    shards = grid.data * grid.context if distributed_optimizer else 1
    need = training_bytes(shape, grid.pp_rank, grid.tensor, grid.pipeline, dtype, shards)
    have = torch.cuda.get_device_properties(device.default_device()).total_memory
    if need > have:
        raise UserError(
            f"training needs {need / 2**30:.1f} GiB on a rank for weights, gradients and optimizer, the GPU has "
            f"{have / 2**30:.1f}: raise parallel.tensor or parallel.pipeline, or parallel.distributed_optimizer = true"
        )
