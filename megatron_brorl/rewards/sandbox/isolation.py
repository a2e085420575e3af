"""The command that starts the first process of a sandbox, under bubblewrap or without isolation."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

UNSANDBOXED = "BRORL_UNSANDBOXED"  # "1" if reward.unsandboxed is true
TIMEOUT_S = "BRORL_REWARD_TIMEOUT_S"  # reward.timeout_s
_INSIDE = Path(__file__).with_name("inside")
_GUARD = ("-I", "-S", "-B", "-X", "utf8")  # options of Python: no environment, site-packages or .pyc files
_START = "import sys; sys.path.insert(0, {!r}); from {} import main; main()"
_MODULE = "megatron_brorl.rewards.sandbox.inside.guard"
USER = 65534  # the user and group id in every sandbox: the unprivileged user `nobody` of Linux
_OUTSIDE = 64000  # the id outside the sandbox to which USER is mapped
_CLONE_NEWUSER = 0x10000000  # <linux/sched.h>


@dataclass(frozen=True)
class Limits:
    """Limits of one program with all of its tests. Its memory is at most processes * memory_mb + 2 * scratch_mb."""

    seconds: float  # for all tests together, after the start of the sandbox
    test_seconds: float  # for one test
    memory_mb: int = 512  # address space of one process
    processes: int = 8  # including threads; the sandbox itself needs three
    output_bytes: int = 1 << 20  # output of one test
    file_mb: int = 8  # size of a file
    scratch_mb: int = 16  # size of /tmp, and also of /dev/shm
    files: int = 64  # number of open files


def set_environment(unsandboxed: bool, timeout_s: float) -> None:
    """Put reward.unsandboxed and reward.timeout_s into the environment of worker processes."""
    os.environ[UNSANDBOXED] = str(int(unsandboxed))
    os.environ[TIMEOUT_S] = str(timeout_s)


def limits() -> Limits:
    """Return the limits in a worker: below the deadline after which the worker itself would be killed."""
    timeout_s = float(os.environ.get(TIMEOUT_S, "5"))
    return Limits(seconds=0.8 * timeout_s, test_seconds=0.4 * timeout_s)


def bare_command() -> list[str]:
    """Return the command without isolation. Only the resource limits of the job apply."""
    package = Path(__file__).parents[3]
    return [sys.executable, *_GUARD, "-c", _START.format(str(package), _MODULE)]


def command(limits: Limits, seccomp: int, info: int) -> tuple[list[str], list[int]]:
    """Return the command under bubblewrap, and the file descriptors to pass on.

    seccomp: a file with the filter. info: the file to which bubblewrap writes the pid.
    """
    fds = [seccomp, info]
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # The guard loses these two capabilities when it changes its user.
        fds.append(_user_namespace())
        user_options = ["--userns", str(_user_namespace()), "--cap-drop", "ALL", "--cap-add", "CAP_SETUID"]
        user_options += ["--cap-add", "CAP_SETGID"]
    else:
        user_options = ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
        user_options += ["--cap-drop", "ALL"]

    # /dev and the root are file systems in memory without a size limit, so they become read-only at the end.
    scratch = ["--perms", "1777", "--size", str(limits.scratch_mb << 20), "--tmpfs"]
    files = [*_files(), "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp"]
    files += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    lifetime = ["--die-with-parent", "--new-session", "--as-pid-1"]
    lifetime += ["--clearenv", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    pipes = ["--seccomp", str(seccomp), "--info-fd", str(info)]
    start = ["/python/bin/python", *_GUARD, "-c", _START.format("/sandbox", _MODULE)]
    return ["bwrap", *user_options, *namespaces, *files, *lifetime, *pipes, *start], fds


@functools.lru_cache(maxsize=1)
def _files() -> tuple[str, ...]:
    """Return arguments that mount /usr, this Python, its standard library and the guard, read-only."""
    files = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            files += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            files += ["--ro-bind", str(path), str(path)]

    # Bubblewrap copies the permissions of the folders above a mount point. A home directory may be closed to others,
    # so the interpreter is mounted under /python.
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    files += ["--dir", "/python", "--dir", "/python/bin", "--ro-bind", interpreter, "/python/bin/python"]
    for name in ("lib", "lib64"):
        path = Path(sys.base_prefix, name)
        if path.is_dir():
            files += ["--ro-bind", str(path), f"/python/{name}"]
    module = _MODULE.rpartition(".")[0].replace(".", "/")
    return (*files, "--ro-bind", str(_INSIDE), f"/sandbox/{module}")


@functools.lru_cache(maxsize=1)
def _user_namespace() -> int:
    """Return a file descriptor of a user namespace that maps root and USER. It is made once per process.

    The limit on the number of processes does not hold for root, so the first process of a sandbox must become another
    user. Raises OSError if this machine permits no namespaces.
    """
    ready_read, ready_write = os.pipe()  # written by the child
    permit_read, permit_write = os.pipe()  # written by this process
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    child = os.fork()
    if child == 0:
        os.close(permit_write)  # Otherwise the child would wait for itself.
        _enter(unshare, ready_write, permit_read)
    os.close(ready_write)
    os.close(permit_read)

    # Only a process outside may map two users. The open file keeps the namespace alive after its first process ends.
    try:
        if os.read(ready_read, 1) != b"+":
            raise OSError("this machine permits no user namespaces")
        for ids in ("uid_map", "gid_map"):
            _write(f"/proc/{child}/{ids}", f"0 0 1\n{USER} {_OUTSIDE} 1\n")
        os.write(permit_write, b"+")
        if os.read(ready_read, 1) != b"+":
            raise OSError("the limit on further user namespaces cannot be set")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(permit_write)
        os.waitpid(child, 0)


def _enter(unshare: ctypes._NamedFuncPointer, ready: int, permit: int) -> None:
    """Enter a new namespace in which no further one can be made; the body of the child."""
    try:
        if unshare(_CLONE_NEWUSER) == 0:
            os.write(ready, b"+")
            if os.read(permit, 1) == b"+":
                _write("/proc/sys/user/max_user_namespaces", "0")
                os.write(ready, b"+")
                os.read(permit, 1)  # Wait until the parent has opened the namespace.
    finally:
        os._exit(0)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
