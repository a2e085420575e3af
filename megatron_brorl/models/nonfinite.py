"""A check that weights are finite before they go to an engine, a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives


def require_finite(named: Mapping[str, Tensor], what: str, then: str) -> None:
    """Raise UserError on every rank if a value of any rank's tensors is NaN or infinite; a collective.

    named: tensors of any shape; ranks may have different ones. what, then: start and end of the message, which names
    the first such tensor and the number of the others.
    """
    broken = [name for name, tensor in named.items() if not _is_finite(tensor)]
    if not collectives.all_reduce_sum({"broken": float(len(broken))})["broken"]:
        return
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, broken)
    names = list(dict.fromkeys(name for part in found for name in part))
    others = f" (and {len(names) - 1} other tensors)" if len(names) > 1 else ""
    raise UserError(f"{what}: weights that are not finite: {names[0]}{others}; {then}")


def _is_finite(tensor: Tensor) -> bool:
    """Check the extremes, which are NaN if any value is. This allocates nothing of the tensor's size."""
    x = dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()
    return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())
