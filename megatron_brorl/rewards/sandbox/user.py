"""Whom a sandbox runs as when the scoring process is root: nobody.

The kernel's bound on the number of processes is void for root, however few rights it has left, so the first process
of a sandbox must become another user. A user namespace that knows two, root and that one, lets it.
"""

from __future__ import annotations

import ctypes
import functools
import os

INSIDE = 65534  # of the user, in every sandbox
_OUTSIDE = 64000  # what the machine sees
_CLONE_NEWUSER = 0x10000000


@functools.lru_cache(maxsize=1)
def namespace() -> int:
    """A file descriptor of the user namespace, made once per process; raises OSError where it may not be made."""
    (ready, tell), (go, permit) = os.pipe(), os.pipe()
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    child = os.fork()
    if child == 0:
        os.close(permit)  # or it would wait for itself
        _enter(unshare, tell, go)
    os.close(tell)
    os.close(go)

    # Only who stands outside may map two users; what is open keeps the namespace when its first process is gone.
    try:
        if os.read(ready, 1) != b"+":
            raise OSError("this machine permits no user namespaces")
        for ids in ("uid_map", "gid_map"):
            _write(f"/proc/{child}/{ids}", f"0 0 1\n{INSIDE} {_OUTSIDE} 1\n")
        os.write(permit, b"+")
        if os.read(ready, 1) != b"+":
            raise OSError("a user namespace cannot be forbidden to make further ones")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.close(permit)
        os.waitpid(child, 0)


def _enter(unshare: ctypes._NamedFuncPointer, tell: int, go: int) -> None:
    """The child: into a new namespace in which nobody can make another one."""
    try:
        if unshare(_CLONE_NEWUSER) == 0:
            os.write(tell, b"+")
            if os.read(go, 1) == b"+":
                _write("/proc/sys/user/max_user_namespaces", "0")
                os.write(tell, b"+")
                os.read(go, 1)  # until it has been opened
    finally:
        os._exit(0)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
