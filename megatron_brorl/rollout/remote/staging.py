"""An update on its way into one file of shared memory, which the ranks of a node write together.

Every rank is sent every tensor, for making them is a collective. Each tensor is copied to the host by one rank of the
node alone, written by one of its threads and checked there. Then every engine of the node gets a name of its own for
the file (a hard link), which it deletes when it has other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.receive import UpdateRefused, receive_each
from megatron_brorl.rollout.remote.shared_weights import Form, HostWeights, TensorRecord, allocate, layout, mapped, view

THREADS = 4  # of a rank
_WAITING = 2 * THREADS  # tensors whose copies wait for a thread, at most

Checksums = dict[str, int]  # of what was written, by name


@dataclass(frozen=True)
class Node:
    """The ranks of a machine that write an update together."""

    rank: int  # of this one among them
    size: int
    folder: Path  # in memory; of the first of them, who makes the file
    exchange: Callable[[Any], list[Any]]  # a collective of theirs: what each gives, in their order

    @staticmethod
    def alone(folder: Path) -> Node:
        """A rank that writes by itself."""
        return Node(0, 1, folder, lambda own: [own])


@dataclass(frozen=True)
class Update:
    """What is written."""

    number: int  # of this update, the same on all ranks of the node
    version: int  # of the weights
    names: Mapping[str, tuple[int, ...]]  # every tensor of the model with its shape
    dtype: torch.dtype  # that tensors are brought to before `form`
    form: Form
    key: str  # of the configuration, that names the folder


def stage(tensors: Iterable[tuple[str, Tensor]], update: Update, node: Node, link: Path | None) -> HostWeights | None:
    """Write a complete, checked update (tensors [any shape]); a collective of the node.

    link: the name of the file for this rank's engine; None where it leads none, and None comes back. Raises
    UpdateRefused on all ranks of the node where one of them saw a fault, and UserError where there is no room.
    """
    records, size = layout(update.names, update.dtype, update.form)
    path = node.folder / f"staged_{update.number}"

    # The first rank makes the file; the stream is read to its end whatever comes of that.
    fault = ""
    if node.rank == 0:
        try:
            allocate(path, size, update.key)
        except UserError as e:
            fault = str(e)  # raised below, where all ranks know it
    fault = node.exchange(fault)[0]
    if fault:
        for _ in tensors:
            pass
        raise UserError(fault)

    # Each writes its share. A fault of one rank is one of all: part of the file is not what it should be.
    own = {name for name, rank in shares(update.names, node.size).items() if rank == node.rank}
    sums: Checksums = {}
    try:
        # The rank's own stream is checked as a whole, its tensors as they lie in the file.
        sums = _write(tensors, update, own, records, path)
    except UpdateRefused as e:
        fault = str(e)
    found: list[tuple[str, Checksums]] = node.exchange((fault, sums))
    faults = [f for f, _ in found if f]
    if not faults and link:
        try:
            link.hardlink_to(path)
        except OSError as e:
            fault = f"weight update: {link}: {e.strerror}"

    # The first name goes when all engines have theirs.
    faults += [f for f in node.exchange(fault) if f and f not in faults]
    if node.rank == 0:
        path.unlink()
    if faults:
        # An engine that has its name already has no use for it.
        if link:
            link.unlink(missing_ok=True)
        raise UpdateRefused(fault or faults[0])
    # Every rank's part of the checksums makes the table that all engines read by.
    total = {name: value for _, part in found for name, value in part.items()}
    whole = tuple(record._replace(checksum=total[record.name]) for record in records)
    return HostWeights(link, update.version, whole) if link else None


def shares(names: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Which rank of a node writes which tensor: the one that has least to write so far."""
    load, owner = [0] * ranks, {}
    for name, shape in names.items():
        owner[name] = load.index(min(load))
        load[owner[name]] += torch.Size(shape).numel()
    return owner


def _write(
    tensors: Iterable[tuple[str, Tensor]], update: Update, own: set[str], records: list[TensorRecord], path: Path
) -> Checksums:
    """Read the stream to its end and write what is in `own`. Raises UpdateRefused."""
    # Filled by threads: each tensor has a place of its own, in the file and in these.
    memory, places = mapped(path), {record.name: record for record in records}
    sums: Checksums = {}
    faults: list[str] = []
    waiting: list[Future[None]] = []

    def place(name: str, tensor: Tensor, expected: Tensor | None) -> None:
        # What lies in the file is checked, which is what a worker will read. Where it has another form than what was
        # sent, it cannot be compared with that.
        sent = dict(update.form(name, tensor.to(update.dtype)))
        for part, x in sent.items():
            written = view(memory, places[part])
            written.copy_(x)
            sums[part] = int(checksum(part, written))
        if expected is not None:
            same = sent.keys() == {name} and sent[name].dtype == tensor.dtype
            if (sums[name] if same else int(checksum(name, tensor))) != int(expected):
                faults.append(name)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="staging") as pool:

        def take(name: str, tensor: Tensor, expected: Tensor | None) -> None:
            if name not in own:
                return
            # A copy, because the stream's tensors are views of buffers that are used again.
            waiting.append(pool.submit(place, name, tensor.detach().clone(), expected))
            # No more copies than threads can soon take, or the whole model would wait on the device.
            if len(waiting) > _WAITING:
                waiting.pop(0).result()

        receive_each(tensors, update.names, take)
        for future in waiting:
            future.result()  # raises what its thread raised
    if faults:
        what = f"{len(faults)} tensors are not what was sent (checksum), for example {min(faults)}"
        raise UpdateRefused(f"weight update: {what}")
    return sums
