"""Megatron's distributed format in two halves: what a rank is to write, which takes collectives, and the writing of it.

The second half may be another thread's, and then is of a copy. Megatron itself forks a process per file and waits for
ever for one that is killed; and an error of one rank, raised between two of its collectives, leaves the others waiting.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from megatron_brorl.checkpoints import verified_files
from megatron_brorl.checkpoints.host_copies import HostCopies
from megatron_brorl.checkpoints.verified_files import Hashing
from megatron_brorl.parallel import device

_FILES = 2  # of a rank, written by as many threads
_METADATA = ".metadata"
Item = tuple[Any, Any]  # torch's WriteItem, and the tensor or bytes that it is about


class _InMemory(FileSystem):
    """In the place of the disk, for what torch would write there by itself: the newest file is kept."""

    def __init__(self) -> None:
        self.data = b""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        self.data = stream.getvalue()

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        """The name is the caller's."""


class _Planned(filesystem_async.FileSystemWriterAsync):
    """Megatron's writer, which takes note of what is to be written and touches no disk."""

    def __init__(self, name: str, copies: HostCopies | None) -> None:
        """name: of the checkpoint; it says nothing of the place, or of the time, so that equal states are equal bytes.
        copies: where to take the tensors as they are now."""
        super().__init__(name, thread_count=_FILES, sync_files=False)
        self.name, self.copies, self.fs = name, copies, _InMemory()
        self.buckets: list[list[Item]] = []  # a file each

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The directory is there."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.prefix = plan.storage_data.prefix
        take = self.copies.take if self.copies else _compact
        if self.copies:
            self.copies.begin()
        for items in filesystem_async._split_by_size_and_type(_FILES, plan.items):
            objects = [(item, planner.resolve_data(item)) for item in items if item.type == WriteItemType.BYTE_IO]
            tensors: list[Any] = [i for i in items if i.type != WriteItemType.BYTE_IO]
            tensors = [(item, take(cast(Tensor, planner.resolve_data(item)))) for item in tensors]
            if objects or tensors:
                self.buckets.append([*objects, *tensors])
        if self.copies:
            device.wait()  # for the last of them
            self.copies.end()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.name, save_id=self.name)


@dataclass
class Shards:
    """What this rank is to write of a checkpoint."""

    _planned: _Planned
    _metadata: Metadata | None  # on rank 0
    _common: bytes  # what is no tensor

    def write(self, directory: Path) -> tuple[dict[str, str], list[Any]]:
        """This rank's files, each by a thread of its own: their SHA-256 by name, and what `index` is to know of them.

        Raises OSError where the disk refuses one.
        """
        planned, self._planned.buckets = self._planned.buckets, []
        names = [f"{self._planned.prefix}{number}.distcp" for number in range(len(planned))]
        write = functools.partial(_write, [self._planned.transforms], directory)
        with ThreadPoolExecutor(max(1, len(planned))) as threads:
            written = list(threads.map(write, names, planned))
        digests = {name: digest for name, (digest, _) in zip(names, written, strict=True)}
        return digests, [result for _, results in written for result in results]

    def index(self, results: Sequence[list[Any]]) -> dict[str, bytes]:
        """The files by which the shards are found, of rank 0 alone. results: what `write` gave, by rank."""
        assert self._metadata is not None
        self._planned.finish(self._metadata, list(results))
        config = CheckpointingConfig("torch_dist", 1)
        return {
            COMMON_STATE_FNAME: self._common,
            CONFIG_FNAME: json.dumps(asdict(config)).encode(),
            _METADATA: self._planned.fs.data,
        }


def plan(states: dict[str, Any], name: str, copies: HostCopies | None) -> Shards:
    """What this rank writes of Megatron's sharded states as the checkpoint of that name; a collective.

    copies: take the state into them as it is now, whatever becomes of it before it is written.
    """
    # As megatron.core.dist_checkpointing.save does before it comes to the disk.
    sharded, common = save_preprocess(states)
    by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    tensors = torch_strategy.mcore_to_pyt_state_dict(by_key, False)

    # The ranks' plans meet on rank 0, which gets the index of them all.
    planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planned = _Planned(name, copies)
    (_, metadata, _), *_ = save_state_dict_async_plan(tensors, planned, None, 0, planner=planner)

    whole = io.BytesIO()
    torch.save(common, whole)
    return Shards(planned, metadata, whole.getvalue())


def _compact(tensor: Tensor) -> Tensor:
    """The tensor itself; a copy of a view, which would be written with all that it is a view of. Contiguous."""
    tensor = tensor.detach().contiguous()
    is_view = tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def _write(transforms: Sequence[Any], directory: Path, name: str, items: Sequence[Item]) -> tuple[str, list[Any]]:
    """One file: its SHA-256, and what is to be known of each item."""
    write: Any = _write_item
    if "serialization_format" in inspect.signature(write).parameters:  # not before torch 2.7
        write = functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)

    def filler(stream: Hashing) -> list[Any]:
        return [write(*transforms, stream, _on_host(data), item, name) for item, data in items]

    return verified_files.fill(directory / name, filler)


def _on_host(data: Any) -> Any:
    return data.cpu() if isinstance(data, Tensor) else data
