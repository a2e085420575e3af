"""Memory that training does not need while an engine generates: out of the device, and back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]


class Offload:
    """The storages under some tensors. Views of them stay valid: what is moved is the memory, not the tensors."""

    def __init__(self, kept: Tensors, dropped: Tensors = tuple) -> None:
        """kept: tensors whose bytes come back. dropped: tensors whose memory comes back with undefined contents."""
        self._kept, self._dropped = kept, dropped
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self) -> None:
        """Copy to host memory and free the device's; nothing happens where they are away already."""
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
        """Take the device's memory again."""
        for storage, host in self._host:
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
        for storage, size in self._empty:
            storage.resize_(size)
        self._host, self._empty = [], []


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each once; those of no bytes not at all."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
