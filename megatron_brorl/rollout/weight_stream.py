"""The stream of a weight update in the trainer. The whole stream is checked before any tensor is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megatron_brorl.ops.checksum import ChecksummedTensor, checksum

NamedTensors = Iterable[tuple[str, Tensor]]  # [any shape], by their names in Hugging Face checkpoints
Shapes = Mapping[str, tuple[int, ...]]  # by the name of a tensor


class UpdateRefused(ValueError):
    """A weight update was incomplete or damaged. The engine keeps the previous version."""


def receive(tensors: NamedTensors, names: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy an update to `device` in `dtype`. It must hold each tensor of `names` (name -> shape) exactly once.

    Copies of ChecksummedTensor pairs are compared with their checksums. Raises UpdateRefused at the end of the stream.
    """
    staged: dict[str, Tensor] = {}
    sums: list[tuple[str, Tensor, Tensor]] = []  # name, expected checksum, checksum of the copy

    def store(name: str, tensor: Tensor, expected: Tensor | None) -> None:
        # The tensor is always copied, because the stream's tensors are views of reused buffers. The expected checksum
        # applies to the stream's dtype, so it cannot be compared with a copy in another dtype.
        staged[name] = tensor.detach().to(device, dtype, copy=True)
        if expected is not None:
            copied = checksum(name, staged[name] if dtype == tensor.dtype else tensor)
            sums.append((name, expected.to(device), copied.to(device)))

    receive_each(tensors, names, store, staged.clear)

    # Compare all checksums at once, because each comparison synchronises with the device.
    if sums:
        sent, expected, copied = zip(*sums, strict=True)
        equal = (torch.stack(expected) == torch.stack(copied)).tolist()
        wrong = [name for name, is_equal in zip(sent, equal, strict=True) if not is_equal]
        if wrong:
            what = f"{len(wrong)} tensors do not match their checksums, for example {wrong[0]}"
            raise UpdateRefused(f"weight update: {what}")
    return staged


def receive_each(
    tensors: NamedTensors,
    names: Shapes,
    store: Callable[[str, Tensor, Tensor | None], None],
    clear: Callable[[], None] = lambda: None,
) -> None:
    """Pass every tensor of an update [any shape] to `store`, with its checksum or None.

    The update must hold each tensor of `names` exactly once. clear: called at the first fault, after which nothing is
    stored. Raises UpdateRefused with this fault at the end of the stream, because the stream is a collective.
    """
    missing = dict(names)
    fault = ""
    received = 0
    try:
        for pair in tensors:
            received += 1
            name, tensor = pair
            if fault:
                continue
            if name not in missing:
                fault = f"{name} is {'sent twice' if name in names else 'unknown'}"
            elif tuple(tensor.shape) != names[name]:
                fault = f"{name} has shape {list(tensor.shape)}, not {names[name]}"
            if fault:
                clear()
                continue
            del missing[name]
            store(name, tensor, pair.checksum if isinstance(pair, ChecksummedTensor) else None)
    except Exception as e:  # raised by the producer of the stream or by store
        what = f"{type(e).__name__}: {e}"
        raise UpdateRefused(f"weight update: failed after {received} of {len(names)} tensors: {what}") from e

    # The stream may end early without an exception.
    if missing and not fault:
        fault = f"{len(missing)} tensors missing, for example {min(missing)}"
    if fault:
        raise UpdateRefused(f"weight update: {fault}")
