"""How Megatron's shards reach the disk: by threads of this process, with whatever the disk refuses kept for later.

Megatron forks a process per file and waits for ever for one that is killed; and an error of one rank, raised between
two of its collectives, leaves the others waiting in the second.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata

Bucket = tuple[str, str, tuple[list[Any], list[Any]]]  # a file's path, its key, and what goes into it


class Refusals:
    """What the disk refused this rank, in order."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Errors of the disk are kept, not raised."""
        try:
            yield
        except OSError as e:
            self.errors.append(e)
        except RuntimeError as e:
            if "PytorchStreamWriter" not in str(e):  # torch.save's way to tell a full disk
                raise
            self.errors.append(e)

    def told(self) -> str:
        """The first, in words; "" where nothing was refused."""
        if not self.errors:
            return ""
        first = self.errors[0]
        text = first.strerror if isinstance(first, OSError) else None
        return text or " ".join(str(first).split())[:200] or type(first).__name__


@contextlib.contextmanager
def writing(refusals: Refusals) -> Iterator[None]:
    """Whatever Megatron saves within it is written so. A save that was refused anything has holes."""

    class Writer(filesystem_async.FileSystemWriterAsync):
        @staticmethod
        def write_preloaded_data_multiproc(
            transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Bucket], results: Any
        ) -> None:
            """Every bucket to its file. results: Megatron's queue for what finish puts into .metadata."""
            written: dict[int, Any] = {i: [] for i in range(len(buckets))}
            with refusals.caught(), ThreadPoolExecutor(max(1, len(buckets))) as threads:
                for i, found in enumerate(threads.map(lambda bucket: _write(transforms, bucket), buckets)):
                    written[i] = found
            results.put(written)

        def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
            with refusals.caught():
                super().finish(metadata, results)

    def caught(call: Callable[..., None]) -> Callable[..., None]:
        def called(*args: Any, **kwargs: Any) -> None:
            with refusals.caught():
                call(*args, **kwargs)

        return called

    # Megatron starts a process that imports torch (190 MiB, seconds) for a queue that its own writers alone need.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    whole = common.TorchCommonSaveStrategy
    before = torch_strategy.FileSystemWriterAsync, whole.save_common, serialization.save_config
    torch_strategy.FileSystemWriterAsync = Writer
    whole.save_common, serialization.save_config = caught(before[1]), caught(before[2])
    try:
        yield
    finally:
        torch_strategy.FileSystemWriterAsync, whole.save_common, serialization.save_config = before


def _write(transforms: Sequence[Any], bucket: Bucket) -> list[Any]:
    """One file, made durable; what Megatron wants to know of each item."""
    name, key, (objects, tensors) = bucket
    write: Any = _write_item
    if "serialization_format" in inspect.signature(write).parameters:  # not before torch 2.7
        write = functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)
    with open(name, "wb") as stream:
        found = [write(*transforms, stream, data, item, key) for item, data in [*objects, *tensors]]
        stream.flush()
        os.fsync(stream.fileno())
    return found
