"""The command that starts the first process of a sandbox: under bubblewrap, or bare where the user has chosen that."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

from megatron_brorl.rewards.sandbox import user
from megatron_brorl.rewards.sandbox.limits import Limits

# Environment of scoring processes.
UNSANDBOXED = "BRORL_UNSANDBOXED"  # "1" if reward.unsandboxed is true
TIMEOUT_S = "BRORL_REWARD_TIMEOUT_S"  # reward.timeout_s
_INSIDE = Path(__file__).with_name("inside")
_GUARD = ("-I", "-S", "-B", "-X", "utf8")
_START = "import sys; sys.path.insert(0, {!r}); from {} import main; main()"
_MODULE = "megatron_brorl.rewards.sandbox.inside.guard"


def tell_workers(bare: bool, timeout_s: float) -> None:
    """Put reward.unsandboxed and reward.timeout_s where the scoring processes of this one will find them."""
    os.environ[UNSANDBOXED], os.environ[TIMEOUT_S] = str(int(bare)), str(timeout_s)


def limits() -> Limits:
    """Those of a scoring process: below the deadline after which it would be killed with what it knows so far."""
    timeout_s = float(os.environ.get(TIMEOUT_S, "5"))
    return Limits(seconds=0.8 * timeout_s, test_seconds=0.4 * timeout_s)


def unsandboxed() -> bool:
    """Whether programs run without isolation here, by reward.unsandboxed."""
    return os.environ.get(UNSANDBOXED) == "1"


def bare_command() -> list[str]:
    """Without isolation; only the limits of the order hold."""
    package = Path(__file__).parents[3]
    return [sys.executable, *_GUARD, "-c", _START.format(str(package), _MODULE)]


def command(limits: Limits, seccomp: int, info: int) -> tuple[list[str], list[int]]:
    """Under bubblewrap, and the file descriptors to hand on. seccomp: holds the filter; info: where its pid goes."""
    fds = [seccomp, info]
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # The guard drops these two rights with the user.
        fds.append(user.namespace())
        who = ["--userns", str(user.namespace()), "--cap-drop", "ALL", "--cap-add", "CAP_SETUID"]
        who += ["--cap-add", "CAP_SETGID"]
    else:
        who = ["--unshare-user", "--disable-userns", "--uid", str(user.INSIDE), "--gid", str(user.INSIDE)]
        who += ["--cap-drop", "ALL"]

    # /dev is a file system in memory without a bound, and so is the root: both are closed once they are made.
    scratch = ["--perms", "1777", "--size", str(limits.scratch_mb << 20), "--tmpfs"]
    files = [*_files(), "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp"]
    files += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    life = ["--die-with-parent", "--new-session", "--as-pid-1"]
    life += ["--clearenv", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    pipes = ["--seccomp", str(seccomp), "--info-fd", str(info)]
    start = ["/python/bin/python", *_GUARD, "-c", _START.format("/sandbox", _MODULE)]
    return [_bubblewrap(), *who, *namespaces, *files, *life, *pipes, *start], fds


def found() -> bool:
    """Whether there is a bubblewrap."""
    return shutil.which("bwrap") is not None


def _bubblewrap() -> str:
    return shutil.which("bwrap") or "bwrap"


@functools.lru_cache(maxsize=1)
def _files() -> tuple[str, ...]:
    """/usr, this Python with its standard library, and the guard, all read-only; nothing else of the machine."""
    files = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            files += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            files += ["--ro-bind", str(path), str(path)]

    # Under names of their own: bubblewrap gives the folders above a mount the rights that they have outside, and a home
    # may be closed to others.
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    files += ["--dir", "/python", "--dir", "/python/bin", "--ro-bind", interpreter, "/python/bin/python"]
    for name in ("lib", "lib64"):
        path = Path(sys.base_prefix, name)
        if path.is_dir():
            files += ["--ro-bind", str(path), f"/python/{name}"]
    module = _MODULE.rpartition(".")[0].replace(".", "/")
    return (*files, "--ro-bind", str(_INSIDE), f"/sandbox/{module}")
