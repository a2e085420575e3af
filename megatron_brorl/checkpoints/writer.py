"""Write Megatron's distributed format in two stages: planning uses collectives, writing accesses only the disk.

The second stage may run in another thread, on a copy of the state. Megatron's own writer forks a process per file and
waits forever if a process is killed. If one rank fails between two collectives of that writer, the others wait forever.
Every file is synced, read back and compared with the bytes written, by SHA-256.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import inspect
import io
import json
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from megatron_brorl.files import sha256
from megatron_brorl.parallel import cpu_bridge

_FILES = 2  # files per rank, each written by its own thread
_METADATA = ".metadata"
T = TypeVar("T")
Item = tuple[Any, Any]  # torch's WriteItem and its tensor or bytes


class HashingFile:
    """A file open for writing that computes the SHA-256 of the data written to it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self.error: OSError | None = None  # the error of the first failed write

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        try:
            return self._raw.write(data)
        except OSError as e:
            self.error = self.error or e
            raise

    def tell(self) -> int:
        return self._raw.tell()

    def flush(self) -> None:
        self._raw.flush()

    def digest(self) -> str:
        """Return the SHA-256 of the data written so far, in hexadecimal."""
        return self._digest.hexdigest()


def write_verified(path: Path, fill: Callable[[HashingFile], T]) -> tuple[str, T]:
    """Write a file with `fill`, and return its SHA-256 and the result of `fill`.

    Raises OSError if a write fails, or if other bytes are read back than were written.
    """
    with open(path, "wb") as raw:
        stream = HashingFile(raw)
        try:
            result = fill(stream)
        except RuntimeError:  # torch.save hides the error of a failed write
            if stream.error:
                raise stream.error from None
            raise
        raw.flush()
        os.fsync(raw.fileno())
        # Drop the file from the page cache, so that it is read back from the disk.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    if sha256(path) != stream.digest():
        raise OSError(errno.EIO, f"{path.name} reads back as other bytes than were written")
    return stream.digest(), result


class _Planned(filesystem_async.FileSystemWriterAsync):
    """Megatron's checkpoint writer, reduced to recording the items to write."""

    def __init__(self, name: str, copy: bool) -> None:
        """name: name of the checkpoint. It contains no path or time, so that equal states give equal bytes."""
        super().__init__(name, thread_count=_FILES, sync_files=False)
        self.name = name
        self.copy = copy
        self.files: list[list[Item]] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.prefix = plan.storage_data.prefix
        prepare = _host_copy if self.copy else _compact
        for items in filesystem_async._split_by_size_and_type(_FILES, plan.items):
            data = [(item, planner.resolve_data(item)) for item in items]
            objects = [pair for pair in data if pair[0].type == WriteItemType.BYTE_IO]
            tensors = [(item, prepare(cast(Tensor, x))) for item, x in data if item.type != WriteItemType.BYTE_IO]
            if objects or tensors:
                self.files.append([*objects, *tensors])
        if self.copy:
            cpu_bridge.wait()  # until the copies are complete


@dataclass
class Shards:
    """This rank's share of a checkpoint, ready to be written."""

    _planned: _Planned
    _metadata: Metadata | None  # None except on rank 0
    _common: bytes  # the state that is not a tensor

    def write(self, directory: Path) -> tuple[dict[str, str], list[Any]]:
        """Write this rank's files, and return their SHA-256 by name and the results for `index`. Raises OSError."""
        items_by_file, self._planned.files = self._planned.files, []  # lets the tensors be freed after writing
        names = [f"{self._planned.prefix}{number}.distcp" for number in range(len(items_by_file))]
        write = functools.partial(_write, [self._planned.transforms], directory)
        with ThreadPoolExecutor(max(1, len(items_by_file))) as threads:
            written = list(threads.map(write, names, items_by_file))
        digests = {name: digest for name, (digest, _) in zip(names, written, strict=True)}
        return digests, [result for _, results in written for result in results]

    def index(self, results: Sequence[list[Any]]) -> dict[str, bytes]:
        """Return the index files of the checkpoint, on rank 0. results: returned by `write`, by rank."""
        assert self._metadata is not None
        self._metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        self._metadata.storage_meta = StorageMeta(checkpoint_id=self._planned.name, save_id=self._planned.name)
        config = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)
        return {
            COMMON_STATE_FNAME: self._common,
            CONFIG_FNAME: json.dumps(asdict(config)).encode(),
            _METADATA: pickle.dumps(self._metadata),
        }


def plan(states: dict[str, Any], name: str, copy: bool) -> Shards:
    """Plan this rank's share of a checkpoint; a collective.

    states: Megatron's sharded states. name: of the checkpoint. copy: copy the tensors to host memory, because they will
    change before they are written.
    """
    # megatron.core.dist_checkpointing.save takes the same steps before it writes.
    sharded, common = save_preprocess(states)
    by_key, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    tensors = torch_strategy.mcore_to_pyt_state_dict(by_key, is_loading=False)

    # Rank 0 gathers the plans and returns the index of all of them.
    planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planned = _Planned(name, copy)
    (_, metadata, _), *_ = save_state_dict_async_plan(tensors, planned, None, 0, planner=planner)

    buffer = io.BytesIO()
    torch.save(common, buffer)
    return Shards(planned, metadata, buffer.getvalue())


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in host memory; the copy of a GPU tensor is complete after cpu_bridge.wait()."""
    pinned = tensor.device.type != "cpu"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return copy.copy_(tensor.detach(), non_blocking=pinned)


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor; a view is copied, because it would be written with its whole storage."""
    tensor = tensor.detach().contiguous()
    is_view = tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def _write(transforms: Sequence[Any], directory: Path, name: str, items: Sequence[Item]) -> tuple[str, list[Any]]:
    """Write one file, and return its SHA-256 and torch's result for each item."""
    write: Any = _write_item
    if "serialization_format" in inspect.signature(write).parameters:  # from torch 2.7 on
        write = functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)

    def fill(stream: HashingFile) -> list[Any]:
        on_host = ((item, data.cpu() if isinstance(data, Tensor) else data) for item, data in items)
        return [write(*transforms, stream, data, item, name) for item, data in on_host]

    return write_verified(directory / name, fill)
