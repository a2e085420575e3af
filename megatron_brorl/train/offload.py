"""Moves tensors that training does not need during generation to host memory, and back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]


class Offload:
    """Moves the storages of some tensors. The tensors and views of them stay valid after a reload."""

    def __init__(self, kept: Tensors, dropped: Tensors = tuple) -> None:
        """kept: tensors whose bytes are restored. dropped: tensors whose contents are undefined after a reload."""
        self._kept = kept
        self._dropped = dropped
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self) -> None:
        """Copy the bytes to host memory and free the device memory, unless that has been done."""
        if self._host or self._empty:
            return
        for storage in _storages(self._kept()):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(_bytes(storage))
            self._host.append((storage, host))
        self._empty = [(storage, storage.nbytes()) for storage in _storages(self._dropped())]
        for storage, _ in (*self._host, *self._empty):
            storage.resize_(0)

    def reload(self) -> None:
        """Allocate device memory and copy the bytes back."""
        for storage, host in self._host:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        for storage, size in self._empty:
            storage.resize_(size)
        self._host = []
        self._empty = []


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages that are not empty."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
