"""Tests of programs in a sandbox.

Hostile programs (attacks.py) do no harm. Harmless programs succeed or fail as they do when CPython runs them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attacks
import pytest
from forks import until

from megatron_brorl.rewards.sandbox import isolation
from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.run import Outcome, Sandbox, problem
from megatron_brorl.rewards.verifiers import code

NEEDS_SANDBOX = pytest.mark.skipif(problem() is not None, reason=str(problem()))
SHORT = Sandbox(isolated=True, limits=Limits(seconds=30.0, test_seconds=0.7, output_bytes=1 << 16))
LONG = Sandbox(isolated=True, limits=Limits(seconds=30.0, test_seconds=15.0, output_bytes=1 << 16))


@pytest.fixture
def secret(tmp_path, monkeypatch):
    monkeypatch.setenv("BRORL_CANARY", "1")
    path = tmp_path / "secret"
    path.write_text("a secret")
    path.chmod(0o666)
    return str(path)


def run(name: str, secret: str, sandbox: Sandbox) -> Outcome:
    """Return the outcome, and check that no process is left and that no file outside has changed."""
    before = children()
    outcome = sandbox.run(attacks.program(name, seed=1, secret=secret), stdin="")
    assert children() <= before
    assert Path(secret).read_text() == "a secret"
    assert list(Path(secret).parent.iterdir()) == [Path(secret)]
    assert "breached" not in outcome.stdout
    assert "a secret" not in outcome.stdout
    return outcome


@pytest.fixture(autouse=True, scope="module")
def _orphans_come_back():
    """Make orphans children of this process, so that `children` finds them."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def children() -> set[str]:
    """Return all descendants of this process, including ended ones that were not waited for."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        if not fields["State"].strip().startswith("Z") or int(fields["PPid"]) == os.getpid():
            parents[path.parent.name] = fields["PPid"].strip()
    pids = {str(os.getpid())}
    while new_pids := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= new_pids
    return pids - {str(os.getpid())}


@pytest.mark.slow
@NEEDS_SANDBOX
@pytest.mark.parametrize("name", attacks.ENDLESS)
def test_endless_programs_are_stopped(name, secret):
    start = time.monotonic()
    assert run(name, secret, SHORT).status in ("timeout", "output", "crash", "error", "ended")
    assert time.monotonic() - start < SHORT.limits.seconds


@NEEDS_SANDBOX
@pytest.mark.parametrize("name", attacks.REFUSED)
def test_forbidden_actions_are_refused(name, secret):
    outcome = run(name, secret, LONG)
    assert (outcome.status, outcome.stdout) == ("ok", "held\n")


@NEEDS_SANDBOX
@pytest.mark.parametrize("name", [*attacks.CRASHING, *attacks.FORGING])
def test_crashing_and_forging_programs_gain_nothing(name, secret):
    assert run(name, secret, SHORT).stdout.strip() != "4711"


@NEEDS_SANDBOX
def test_harmless_attacks_succeed_without_isolation(secret):
    """Show that it is the sandbox that makes attacks fail in test_forbidden_actions_are_refused."""
    bare = Sandbox(isolated=False, limits=LONG.limits)
    for name in ("read a file", "read /etc/passwd", "/proc", "UNIX socket", "memfd", "list the root"):
        outcome = bare.run(attacks.program(name, seed=1, secret=secret), stdin="")
        assert outcome.stdout == "breached\n", name


@NEEDS_SANDBOX
def test_an_orphan_of_one_test_is_gone_before_the_next():
    """The second test sees no process of the first."""
    program = (
        "import os, time\n"
        "if input() == '1':\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); time.sleep(1e6)\n"
        "else:\n"
        "    pids = [int(p) for p in range(4, 400) if alive(p)]\n"
        "    print(pids == [os.getpid()])\n"
    )
    helper = "def alive(p):\n    import os\n    try: os.kill(p, 0)\n    except OSError: return False\n    return True\n"
    first, second = LONG.scripts(helper + program, ["1", "2"])
    assert (first.status, second.stdout) == ("ok", "True\n")


@NEEDS_SANDBOX
def test_programs_can_use_files_threads_processes_and_pipes():
    program = (
        "import asyncio, os, subprocess, tempfile, threading\n"
        "with open('/tmp/a', 'w') as f: f.write('x' * (1 << 20))\n"
        "with tempfile.TemporaryFile() as f: f.write(b'x')\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout, end='', flush=True)\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "print(os.path.getsize('/tmp/a'), input())\n"
    )
    outcome = LONG.run(program, "ä\n")
    assert (outcome.status, outcome.stdout) == ("ok", f"thread\nprocess\n{1 << 20} ä\n"), outcome


@NEEDS_SANDBOX
def test_programs_run_as_an_unprivileged_user(tmp_path):
    program = (
        "import os, ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "class H(ctypes.Structure): _fields_ = [('v', ctypes.c_uint32), ('p', ctypes.c_int)]\n"
        "data = (ctypes.c_uint32 * 6)()\n"
        "assert libc.capget(ctypes.byref(H(0x20080522, 0)), data) == 0\n"
        "print(os.getuid(), os.getgid(), os.geteuid(), list(data)[:2], libc.prctl(39, 0, 0, 0, 0), os.getgroups())\n"
    )
    outcome = LONG.run(program, stdin="")
    # capget returns the effective and permitted capabilities. 39 is PR_GET_NO_NEW_PRIVS: exec gives no privileges.
    assert outcome.stdout == f"{isolation.USER} {isolation.USER} {isolation.USER} {[0, 0]} 1 {[]}\n", outcome


@NEEDS_SANDBOX
def test_the_number_of_processes_is_bounded():
    program = (
        "import os, time\nn = 0\n"
        "try:\n    while n < 100:\n        if os.fork() == 0: time.sleep(1e6)\n        n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    assert 0 < int(LONG.run(program, stdin="").stdout) <= LONG.limits.processes


@NEEDS_SANDBOX
def test_killing_the_scoring_process_ends_its_sandboxes(tmp_path):
    """SIGKILL gives the process no chance to clean up."""
    code = (
        "from megatron_brorl.rewards.sandbox.run import Sandbox\n"
        "from megatron_brorl.rewards.sandbox.isolation import Limits\nprint('+', flush=True)\n"
        "Sandbox(True, Limits(seconds=600.0, test_seconds=600.0)).run('import time; time.sleep(600)', stdin='')"
    )
    before = children()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(2)  # "+\n": the imports are done.
    until(lambda: len(children() - before) >= 5)  # the process, bubblewrap, guard, runner, test
    process.kill()
    process.wait()
    process.stdout.close()

    def gone() -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # Reap orphans, which are children of this process.
        return children() <= before

    until(gone)


THREAD = "import sys, threading\n"

# Harmless programs that read nothing. CPython decides whether one succeeds, and its output.
EXITS = {
    # Successful exits.
    "sys.exit(None)": "import sys\nprint('OK')\nsys.exit(None)",
    "caught": "import sys\ntry:\n    sys.exit(1)\nexcept SystemExit:\n    print('OK')",
    "sys.exit(256)": "import sys\nprint('OK')\nsys.exit(256)",
    "os._exit without a flush": "import os\nprint('OK')\nos._exit(0)",
    # Threads.
    "the thread prints after the main exit": THREAD
    + "import time\ndef f():\n    time.sleep(0.05)\n    print('OK')\nthreading.Thread(target=f).start()\nsys.exit(0)",
    # Work at the end.
    "atexit prints without an exit": "import atexit\natexit.register(print, 'OK')",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)\nprint('OK')",
    # Text that is not flushed yet.
    "another sys.stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb'), write_through=False)\n"
    "print('OK')\nsys.exit(0)",
    "fast output": "import os, sys\nfrom io import BytesIO\nclass W:\n    def __init__(self, f):\n"
    "        self.b = BytesIO()\n"
    "        self.fd = f.fileno()\n    def write(self, s): self.b.write(s.encode())\n    def flush(self):\n"
    "        os.write(self.fd, self.b.getvalue())\n        self.b.truncate(0), self.b.seek(0)\n"
    "sys.stdout = W(sys.stdout)\nprint('OK')\nsys.exit(0)",
    "sys.stdout closed": "import sys\nprint('OK')\nsys.stdout.close()",
    # Input, threads and child processes.
    "at the end of the input": "import sys\nwhile True:\n    try: input()\n    except EOFError:\n        print('OK')\n"
    "        sys.exit(0)",
    "a daemon thread is left": THREAD
    + "import time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('OK')\nsys.exit(0)",
    # Failures.
    "sys.exit(2 ** 100)": "import sys\nprint('OK')\nsys.exit(2 ** 100)",
    "sys.exit of a text": "import sys\nprint('OK')\nsys.exit('done')",
    "an error": "print('OK')\n1 / 0",
    "a signal": "import os, signal\nprint('OK', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)",
    "an own flush that fails": "import sys\nprint('OK', flush=True)\nclass W:\n    def write(self, s): pass\n"
    "    def flush(self): raise OSError\nsys.stdout = W()",
}

# The function that FORMS tests.
ADD = "def add(a, b): return a + b\n"

# Programs that end while they are loaded, with the expected share of passed tests.
LOADED = {
    "sys.exit(main())": (ADD + "import sys\ndef main(): print(add(1, 2))\nsys.exit(main())", 1.0),
    "a child exits": (ADD + "import os, sys\nif os.fork() == 0: os._exit(0)\nos.wait()\nsys.exit(0)", 1.0),
    "a child fails": (ADD + "import os\nif os.fork() == 0: raise ValueError\nos.wait()", 1.0),
    "atexit of os._exit": (ADD + "import atexit, os\natexit.register(os._exit, 0)", 1.0),
    "sys.stdout closed": (ADD + "import sys\nsys.stdout.close()\nsys.exit(0)", 1.0),
    "an exit before the function": ("import sys\nsys.exit(0)\n" + ADD, 0.0),
    "os._exit after a flush": (ADD + "import os\nprint(1, flush=True)\nos._exit(0)", 0.0),
    "sys.exit(1)": (ADD + "import sys\nsys.exit(1)", 0.0),
}

# Functions that end the program for some of the arguments (0, 4711), (1, 4712), (2, 4713), with the passed share.
CALLED = {
    "sys.exit(0)": ("import sys\ndef add(a, b): sys.exit(0)", 0.0),
    "os._exit in a thread": (
        "import os, threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=os._exit, args=(0,)).start()\n    time.sleep(9)\n    return a + b",
        0.0,
    ),
    "exec of echo": ("import os\ndef add(a, b): os.execv('/bin/echo', ['echo', str(a + b)])", 0.0),
    "finally exits": ("import sys\ndef add(a, b):\n    try: return a + b\n    finally: sys.exit(0)", 0.0),
    "one of three exits": ("import sys\ndef add(a, b):\n    if a == 1: sys.exit(0)\n    return a + b", 2 / 3),
    "caught": ("import sys\ndef add(a, b):\n    try: sys.exit(0)\n    except SystemExit: return a + b", 1.0),
    "a child returns": ("import os\ndef add(a, b):\n    if os.fork(): os.wait()\n    return a + b", 1.0),
    "a thread goes on": (
        "import threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    return a + b",
        1.0,
    ),
}

FORMS = {
    "function": {"tests": [{"args": [i, i + 4711], "expected": 2 * i + 4711} for i in range(3)]},
    "asserts": {"asserts": [f"assert add({i}, {i + 4711}) == {2 * i + 4711}" for i in range(3)]},
}


def mostly_slow(names: Iterable[str]) -> list[Any]:
    """Return all names, four of five of them marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow if i % 5 else ()) for i, name in enumerate(names)]


@NEEDS_SANDBOX
@pytest.mark.parametrize("name", mostly_slow(EXITS))
def test_a_script_ends_as_it_does_under_cpython(name, tmp_path):
    """Success is the same, and so is the output of successful programs."""
    path = tmp_path / "solution.py"
    path.write_text(EXITS[name])
    real = subprocess.run([sys.executable, "-I", str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    outcome = LONG.run(EXITS[name], stdin="")
    assert (outcome.status == "ok") == (real.returncode == 0), outcome
    if real.returncode == 0:
        assert outcome.stdout == real.stdout


@NEEDS_SANDBOX
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", mostly_slow([*(f"loaded {n}" for n in LOADED), *(f"called {n}" for n in CALLED)]))
def test_a_test_passes_only_if_the_function_returns(name, form):
    stage, _, case = name.partition(" ")
    program, share = {"loaded": LOADED, "called": CALLED}[stage][case]
    row = {"id": "1", "prompt": "", "answer": None, "metadata": {"function": "add", **FORMS[form]}}
    assert code.verify(program, row, LONG).reward == share


def test_builtin_values_survive_encoding_and_classes_do_not():
    plain = [None, True, 1, -2.5, "x", [1, [2]], {"a": 1}]
    for value in [*plain, (1, (2,)), {1, 2}, frozenset("a"), {1: 2}, {"!": 1}, 1j, b"\0"]:
        back = codec.decode(codec.parse(json.dumps(codec.encode(value))))
        assert back == value
        assert type(back) is type(value)
    for value in (float("inf"), float("-inf"), float("nan")):
        assert repr(codec.decode(codec.encode(value))) == repr(value)

    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(codec.encode(Sly(3))) is int
    assert type(codec.decode(codec.encode(collections.Counter("aab")))) is dict
    endless: list[object] = []
    endless.append(endless)
    for bad in (object(), range(3), endless):
        with pytest.raises(codec.Unencodable):
            codec.encode(bad)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "9" * 5000, "{", b"\xff", '{"!": "os", "v": []}', '{"!": "set", "v": [[]]}', '{"!": "dict"}'],
)
def test_malformed_values_are_refused(text):
    with pytest.raises(codec.Unencodable):
        codec.decode(codec.parse(text))
