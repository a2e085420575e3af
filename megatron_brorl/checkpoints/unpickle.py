"""Pickles of checkpoints by an allow-list. A checkpoint may come from somebody else, and a pickle can run any code.

Megatron's format has three kinds: .metadata (torch's pickle of the layout), common.pt, and objects within the shards.
The manifest is no signature: whoever writes a checkpoint writes that too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem

from megatron_brorl.errors import UserError

# Found in .metadata: descriptions of tensors and of files, none of which does anything when it is made.
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch.strided": {"_MEM_FORMAT_ENCODING"},
    "torch": {
        "Size", "device", "float64", "float32", "float16", "bfloat16", "uint8", "int64", "int32", "bool", "strided",
        "float8_e4m3fn", "float8_e5m2",
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "io": {"BytesIO"},
    "_io": {"BytesIO"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise UserError(f"asks for {module}.{name}, which no checkpoint of this program holds")
        return super().find_class(module, name)


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """Whatever torch and Megatron unpickle within it is made of these classes, or of those of torch's weights_only.

    Raises UserError, without a path, for anything else.
    """
    pickles, load = filesystem.pickle, torch.load

    @functools.wraps(load)
    def careful(*args: Any, **kwargs: Any) -> Any:
        """Also where the caller asks for weights_only=False."""
        try:
            return load(*args, **{**kwargs, "weights_only": True})
        except pickle.UnpicklingError as e:
            raise UserError(f"holds what is no tensor: {' '.join(str(e).split())[:200]}") from None

    # By name in the one module that reads .metadata; torch.load for all, since it is called as that.
    filesystem.pickle = SimpleNamespace(**{**vars(pickle), "load": _load})  # type: ignore[assignment]
    torch.load = careful
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        filesystem.pickle, torch.load = pickles, load


def _load(file: BinaryIO) -> Any:
    return _Unpickler(file).load()
