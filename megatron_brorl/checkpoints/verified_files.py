"""Files whose bytes on the disk are those that were meant: written, made durable, read again and compared."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

Filled = TypeVar("Filled")


class Refusals:
    """What the disk refused this rank, in order."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Errors of the disk are kept, not raised."""
        try:
            yield
        except OSError as e:
            self.errors.append(e)

    def told(self) -> str:
        """The first, in words; "" where nothing was refused."""
        if not self.errors:
            return ""
        first = self.errors[0]
        return first.strerror or " ".join(str(first).split())[:200] or type(first).__name__


class Hashing:
    """A file that is open for writing, and the SHA-256 of what was handed to it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._digest = raw, hashlib.sha256()
        self.refusal: OSError | None = None  # the first of a write

    def write(self, data: bytes) -> int:
        """As of the file."""
        self._digest.update(data)
        try:
            return self._raw.write(data)
        except OSError as e:
            self.refusal = self.refusal or e
            raise

    def tell(self) -> int:
        """As of the file."""
        return self._raw.tell()

    def flush(self) -> None:
        """As of the file."""
        self._raw.flush()

    def digest(self) -> str:
        """Of what was written so far."""
        return self._digest.hexdigest()


def fill(path: Path, filler: Callable[[Hashing], Filled]) -> tuple[str, Filled]:
    """Make a file of what `filler` writes to it; the SHA-256 of that, and what filler returned.

    Raises OSError where the disk refuses it, or gives back other bytes than it was given.
    """
    with open(path, "wb") as raw:
        stream = Hashing(raw)
        try:
            filled = filler(stream)
        except RuntimeError:  # torch.save's, of what a refused write has left of its archive
            if stream.refusal:
                raise stream.refusal from None
            raise
        raw.flush()
        os.fsync(raw.fileno())
        # What is read again comes from the disk and not from memory, where the system lets us ask for that.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    meant = stream.digest()
    if sha256(path) != meant:
        raise OSError(errno.EIO, f"{path.name} reads back as other bytes than were written")
    return meant, filled


def write(path: Path, data: bytes) -> str:
    """The same of a file of these bytes; their SHA-256."""
    return fill(path, lambda stream: stream.write(data))[0]


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
