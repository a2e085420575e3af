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
    # Read one tensor, because the device would idle after the read of each.
    finite = torch.stack([_extremes(x) for x in named.values()]).isfinite().all(dim=1).tolist() if named else []
    broken = [name for name, is_finite in zip(named, finite, strict=True) if not is_finite]
    if not collectives.all_reduce_sum({"broken": float(len(broken))})["broken"]:
        return
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, broken)
    names = list(dict.fromkeys(name for part in found for name in part))
    others = f" (and {len(names) - 1} other tensors)" if len(names) > 1 else ""
    raise UserError(f"{what}: weights that are not finite: {names[0]}{others}; {then}")


def _extremes(tensor: Tensor) -> Tensor:
    """Return the minimum and the maximum [2], which are NaN if any value is. No copy of the tensor is made."""
    x = dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()
    return torch.stack(torch.aminmax(x)) if x.numel() else x.new_zeros(2)
