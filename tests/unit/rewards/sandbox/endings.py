"""No tests: programs that end in many ways.

Each of EXITS prints NO, reads nothing and harms nothing, so a test may also run it outside of a sandbox and compare.
"""

from __future__ import annotations

_THREAD = "import sys, threading\n"
_FILE = "f = open(1, 'w', closefd=False)\n"

# By name. Whether one succeeds, and what it prints, is what CPython does with it.
EXITS = {
    # An exit that succeeds.
    "sys.exit()": "print('NO'); import sys; sys.exit()",
    "sys.exit(0)": "print('NO'); import sys; sys.exit(0)",
    "sys.exit(None)": "import sys\nprint('NO')\nsys.exit(None)",
    "sys.exit(False)": "import sys\nprint('NO')\nsys.exit(False)",
    "raise SystemExit": "print('NO')\nraise SystemExit",
    "raise SystemExit()": "print('NO')\nraise SystemExit()",
    "raise SystemExit(0)": "print('NO')\nraise SystemExit(0)",
    "raise SystemExit(None)": "print('NO')\nraise SystemExit(None)",
    "exit()": "print('NO')\nexit()",
    "exit(0)": "print('NO')\nexit(0)",
    "quit()": "print('NO')\nquit()",
    "quit(0)": "print('NO')\nquit(0)",
    "sys.exit(main())": "import sys\ndef main():\n    print('NO')\nsys.exit(main())",
    "main returns 0": "import sys\ndef main():\n    print('NO')\n    return 0\nif __name__ == '__main__':\n"
    "    sys.exit(main())",
    "raise SystemExit(main())": "def main():\n    print('NO')\nraise SystemExit(main())",
    "from sys import exit": "from sys import exit\nprint('NO')\nexit(0)",
    "in a branch": "import sys\nn = 3\nif n % 2:\n    print('NO')\n    sys.exit()\nprint('YES')",
    "in a loop": "import sys\nfor i in range(9):\n    if i == 3:\n        print('NO')\n        sys.exit(0)\n"
    "print('YES')",
    "in nested calls": "import sys\ndef f(n):\n    if not n:\n        print('NO')\n        sys.exit(0)\n    f(n - 1)\n"
    "f(50)",
    "in a generator": "import sys\ndef g():\n    yield 1\n    sys.exit(0)\nprint('NO')\nfor _ in g(): pass\n"
    "print('YES')",
    "in a comprehension": "import sys\nprint('NO')\n[sys.exit(0) if i else i for i in range(3)]",
    "in a class body": "import sys\nprint('NO')\nclass A:\n    sys.exit(0)",
    "in a method": "import sys\nclass A:\n    def __init__(self):\n        print('NO')\n        sys.exit(0)\nA()",
    "in a lambda": "import sys\nprint('NO')\n(lambda: sys.exit(0))()",
    "in asyncio": "import asyncio, sys\nasync def main():\n    print('NO')\n    sys.exit(0)\nasyncio.run(main())",
    "an own subclass": "class Done(SystemExit): pass\nprint('NO')\nraise Done",
    "with a try around": "import sys\ntry:\n    print('NO')\n    sys.exit(0)\nexcept Exception:\n    print('YES')",
    "with finally": "import sys\ntry:\n    sys.exit(0)\nfinally:\n    print('NO')",
    "finally returns": "import sys\ndef f():\n    try:\n        sys.exit(1)\n    finally:\n        return\nf()\n"
    "print('NO')",
    "with a context manager": "import sys, contextlib\n@contextlib.contextmanager\ndef c():\n    try: yield\n"
    "    finally: print('NO')\n"
    "with c(): sys.exit(0)",
    "caught": "import sys\ntry:\n    sys.exit(1)\nexcept SystemExit:\n    print('NO')",
    "caught and raised again": "import sys\ntry:\n    sys.exit(0)\nexcept SystemExit:\n    print('NO')\n    raise",
    "suppressed": "import sys, contextlib\nwith contextlib.suppress(SystemExit):\n    sys.exit(1)\nprint('NO')",
    "the code is set later": "e = SystemExit(1)\ne.code = 0\nprint('NO')\nraise e",
    "256": "import sys\nprint('NO')\nsys.exit(256)",
    "an int's subclass": "import sys, enum\nclass Code(enum.IntEnum):\n    OK = 0\nprint('NO')\nsys.exit(Code.OK)",
    "os._exit after a flush": "import os\nprint('NO', flush=True)\nos._exit(0)",
    "os._exit after sys.stdout.flush": "import os, sys\nprint('NO')\nsys.stdout.flush()\nos._exit(os.EX_OK)",
    "os._exit after os.write": "import os\nos.write(1, b'NO\\n')\nos._exit(0)",
    "os._exit without a flush": "import os\nprint('NO')\nos._exit(0)",
    "os._exit in finally": "import os\ntry:\n    print('NO', flush=True)\nfinally:\n    os._exit(0)",
    "exec of another program": "import os\nos.execv('/bin/echo', ['echo', 'NO'])",
    "exec with text unflushed": "import os\nprint('YES')\nos.execv('/bin/echo', ['echo', 'NO'])",
    "a child that exits": "import os, sys\nif os.fork() == 0:\n    print('NO')\n    sys.exit(0)\nos.wait()\n"
    "sys.exit(0)",
    "a child that ends": "import os\npid = os.fork()\nif pid:\n    os.wait()\nelse:\n    print('NO')",
    # Threads.
    "sys.exit in a thread": _THREAD
    + "t = threading.Thread(target=sys.exit, args=(1,))\nt.start()\nt.join()\nprint('NO')",
    "an error in a thread": _THREAD + "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint('NO')",
    "the thread prints after the main exit": _THREAD
    + "import time\ndef f():\n    time.sleep(0.05)\n    print('NO')\nthreading.Thread(target=f).start()\nsys.exit(0)",
    "a big stack": _THREAD + "threading.stack_size(1 << 26)\ndef main():\n    print('NO')\n    sys.exit(0)\n"
    "threading.Thread(target=main).start()",
    "os._exit in a thread": _THREAD
    + "import os\ndef f():\n    print('NO', flush=True)\n    os._exit(0)\nt = threading.Thread(target=f)\nt.start()\n"
    "t.join()\nprint('YES')",
    "a pool of threads": "import sys\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(2) as p:\n"
    "    print(*p.map(str, ['NO']))\nsys.exit(0)",
    # What is done at the end.
    "atexit prints": "import atexit, sys\natexit.register(print, 'NO')\nsys.exit(0)",
    "atexit prints without an exit": "import atexit\natexit.register(print, 'NO')",
    "atexit in order": "import atexit\natexit.register(print, 'O')\natexit.register(print, 'N', end='')",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)\nprint('NO')",
    "atexit raises SystemExit": "import atexit, sys\natexit.register(sys.exit, 1)\nprint('NO')",
    "atexit and os._exit": "import atexit, os\natexit.register(print, 'NO')\nprint('NO', flush=True)\nos._exit(0)",
    "atexit of os._exit": "import atexit, os\natexit.register(os._exit, 0)\nprint('NO', flush=True)",
    "a finalizer prints": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'NO')",
    "__del__ prints": "class A:\n    def __del__(self): print('NO')\na = A()",
    "a generator is closed": "def g():\n    try: yield\n    finally: print('NO')\nx = g()\nnext(x)",
    # Where the text stands when the program ends.
    "no newline": "import sys\nsys.stdout.write('NO')\nsys.exit(0)",
    "an open file on 1": _FILE + "f.write('NO\\n')",
    "an open file on 1 and an exit": "import sys\n" + _FILE + "f.write('NO\\n')\nsys.exit(0)",
    "an open file on 1 and os._exit": "import os\n" + _FILE + "f.write('NO\\n')\nos._exit(0)",
    "an open file in a function": "def main():\n    f = open(1, 'w')\n    f.write('NO\\n')\nmain()",
    "print to an open file": _FILE + "print('NO', file=f)\nexit()",
    "a buffered writer": "import io, sys\nout = io.BufferedWriter(io.FileIO(1, 'w', closefd=False))\n"
    "out.write(b'NO\\n')\nsys.exit(0)",
    "another sys.stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb'), write_through=False)\n"
    "print('NO')\nsys.exit(0)",
    "a wrapped sys.stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\n"
    "print('NO')",
    "the old sys.stdout": "import io, sys\nold = sys.stdout\nsys.stdout = io.StringIO()\nold.write('NO')\nsys.exit(0)",
    "sys.__stdout__": "import io, sys\nsys.stdout = io.StringIO()\nprint('YES')\nsys.__stdout__.write('NO')",
    "StringIO at the end": "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint('NO')\nsys.exit(0)",
    "fast output": "import os, sys\nfrom io import BytesIO\nclass W:\n    def __init__(self, f):\n"
    "        self.b = BytesIO()\n"
    "        self.fd = f.fileno()\n    def write(self, s): self.b.write(s.encode())\n    def flush(self):\n"
    "        os.write(self.fd, self.b.getvalue())\n        self.b.truncate(0), self.b.seek(0)\n"
    "sys.stdout = W(sys.stdout)\nprint('NO')\nsys.exit(0)",
    "sys.stdout closed": "import sys\nprint('NO')\nsys.stdout.close()",
    "sys.stdout closed and an exit": "import sys\nprint('NO')\nsys.stdout.close()\nsys.exit(0)",
    "1 closed after a flush": "import os\nprint('NO', flush=True)\nos.close(1)",
    "1 closed without a flush": "import os\nprint('NO')\nos.close(1)",
    "no sys.stdout": "import sys\nprint('NO', flush=True)\nsys.stdout = None",
    "sys.stdout deleted": "import sys\nprint('NO', flush=True)\ndel sys.stdout",
    "stdin closed": "import sys\nprint('NO')\nsys.stdin.close()\nsys.exit(0)",
    "redirected": "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    print('NO')\n"
    "    x = 1\nprint(b.getvalue(), end='')\nexit(0)",
    "sys.stdout.buffer": "import sys\nsys.stdout.buffer.write(b'NO\\n')\nsys.exit(0)",
    "a file of a class": "import sys\nclass Out:\n    f = open(1, 'w')\nOut.f.write('NO\\n')\nsys.exit(0)",
    "a file of a closure": "def make():\n    f = open(1, 'w')\n    return lambda s: print(s, file=f)\nsay = make()\n"
    "say('NO')",
    "a partial print": "import functools\nprint = functools.partial(print, file=open(1, 'w'))\nprint('NO')\nexit(0)",
    "a log": "import logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(message)s')\nlogging.error('NO')\n"
    "sys.exit()",
    "a log in memory": "import logging, logging.handlers, sys\n"
    "h = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))\n"
    "logging.getLogger().addHandler(h)\nlogging.warning('NO')\nsys.exit(0)",
    "an exit stack": "import contextlib, sys\ns = contextlib.ExitStack()\ns.callback(print, 'NO')\nwith s: sys.exit(0)",
    # Elsewhere than in the program's own lines.
    "in exec": "exec('import sys; print(\"NO\"); sys.exit(0)')",
    "in a signal's handler": "import signal, sys, time\nsignal.signal(signal.SIGALRM, lambda *a: sys.exit(0))\n"
    "print('NO')\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(9)",
    "at the end of the input": "import sys\nwhile True:\n    try: input()\n    except EOFError:\n        print('NO')\n"
    "        sys.exit(0)",
    "readline at the end": "import sys\nprint('NO')\nwhile True:\n    if not sys.stdin.readline(): exit()",
    "a daemon thread is left": _THREAD
    + "import time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('NO')\nsys.exit(0)",
    "a process": "import multiprocessing, sys\nmultiprocessing.set_start_method('fork')\n"
    "p = multiprocessing.Process(target=print, args=('NO',))\np.start()\np.join()\nsys.exit(p.exitcode)",
    "a program of a program": "import subprocess, sys\n"
    "sys.exit(subprocess.call([sys.executable, '-c', 'print(\"NO\"); raise SystemExit']))",
    "a program of a program fails": "import subprocess, sys\n"
    "sys.exit(subprocess.call([sys.executable, '-c', 'print(\"NO\"); raise SystemExit(3)']))",
    "all files but three are closed": "import os, sys\nprint('NO')\nos.closerange(3, 256)\nsys.exit(0)",
    "argparse": "import argparse\np = argparse.ArgumentParser(prog='NO')\np.exit(0, print('NO'))",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self): print('NO')\nunittest.main()",
    "unittest fails": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail(print('NO'))\n"
    "unittest.main()",
    "argparse fails": "import argparse\nprint('NO')\nargparse.ArgumentParser().parse_args(['x'])",
    # Exits and ends that are failures.
    "sys.exit(1)": "import sys\nprint('NO')\nsys.exit(1)",
    "sys.exit(True)": "import sys\nprint('NO')\nsys.exit(True)",
    "sys.exit(-1)": "import sys\nprint('NO')\nsys.exit(-1)",
    "sys.exit(255)": "import sys\nprint('NO')\nsys.exit(255)",
    "sys.exit(2 ** 100)": "import sys\nprint('NO')\nsys.exit(2 ** 100)",
    "sys.exit(0.0)": "import sys\nprint('NO')\nsys.exit(0.0)",
    "sys.exit of a text": "import sys\nprint('NO')\nsys.exit('done')",
    "sys.exit of no text": "import sys\nprint('NO')\nsys.exit('')",
    "sys.exit('0')": "import sys\nprint('NO')\nsys.exit('0')",
    "sys.exit([])": "import sys\nprint('NO')\nsys.exit([])",
    "sys.exit(print())": "import sys\nsys.exit(print('NO'))",
    "exit(1)": "print('NO')\nexit(1)",
    "quit of a text": "print('NO')\nquit('done')",
    "SystemExit of two": "print('NO')\nraise SystemExit(0, 0)",
    "main returns 1": "import sys\ndef main():\n    print('NO')\n    return 1\nsys.exit(main())",
    "main returns True": "import sys\ndef main():\n    print('NO')\n    return True\nsys.exit(main())",
    "main returns the answer": "import sys\ndef main():\n    print('NO')\n    return 'NO'\nsys.exit(main())",
    "an exit after an error": "import sys\nprint('NO')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.exit(1)",
    "an error in finally": "import sys\ntry:\n    print('NO')\n    sys.exit(0)\nfinally:\n    1 / 0",
    "os._exit(1)": "import os\nprint('NO', flush=True)\nos._exit(1)",
    "atexit of os._exit(3)": "import atexit, os\natexit.register(os._exit, 3)\nprint('NO', flush=True)",
    "an error": "print('NO')\n1 / 0",
    "an assertion": "print('NO')\nassert False",
    "KeyboardInterrupt": "print('NO')\nraise KeyboardInterrupt",
    "GeneratorExit": "print('NO')\nraise GeneratorExit",
    "a signal": "import os, signal\nprint('NO', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)",
    "an own flush that fails": "import sys\nprint('NO', flush=True)\nclass W:\n    def write(self, s): pass\n"
    "    def flush(self): raise OSError\nsys.stdout = W()",
    "exec of a program that fails": "import os\nprint('NO', flush=True)\nos.execv('/bin/false', ['false'])",
}

# Programs for the forms that call a function. Each defines add(a, b) and ends somehow.

ADD = "def add(a, b): return a + b\n"

# The program ends while it is loaded: the share of its tests that it should pass.
LOADED = {
    "sys.exit()": (ADD + "import sys\nsys.exit()", 1.0),
    "sys.exit(0)": (ADD + "import sys\nsys.exit(0)", 1.0),
    "sys.exit(None)": (ADD + "import sys\nsys.exit(None)", 1.0),
    "sys.exit(False)": (ADD + "import sys\nsys.exit(False)", 1.0),
    "raise SystemExit": (ADD + "raise SystemExit", 1.0),
    "exit()": (ADD + "exit()", 1.0),
    "quit(0)": (ADD + "quit(0)", 1.0),
    "sys.exit(main())": (ADD + "import sys\ndef main(): print(add(1, 2))\nsys.exit(main())", 1.0),
    "in a branch": (ADD + "import sys\nif add(1, 2) == 3: sys.exit(0)\nraise ValueError", 1.0),
    "under __main__": (ADD + "import sys\nif __name__ == '__main__': sys.exit(1)", 1.0),
    "with finally": (ADD + "import sys\ntry: sys.exit(0)\nfinally: print('end')", 1.0),
    "caught": ("import sys\ntry: sys.exit(1)\nexcept SystemExit: pass\n" + ADD, 1.0),
    "in a thread": (ADD + "import sys, threading\nt = threading.Thread(target=sys.exit)\nt.start()\nt.join()", 1.0),
    "a child exits": (ADD + "import os, sys\nif os.fork() == 0: os._exit(0)\nos.wait()\nsys.exit(0)", 1.0),
    "a child ends": (ADD + "import os\nif os.fork(): os.wait()", 1.0),
    "a child's sys.exit": (ADD + "import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()\nsys.exit(0)", 1.0),
    "a child fails": (ADD + "import os\nif os.fork() == 0: raise ValueError\nos.wait()", 1.0),
    "atexit prints": (ADD + "import atexit\natexit.register(print, 'end')\nexit()", 1.0),
    "atexit of os._exit": (ADD + "import atexit, os\natexit.register(os._exit, 0)", 1.0),
    "unflushed text": (ADD + "print('3', end='')\nexit(0)", 1.0),
    "sys.stdout closed": (ADD + "import sys\nsys.stdout.close()\nsys.exit(0)", 1.0),
    "a wrong function": ("import sys\ndef add(a, b): return a\nsys.exit(0)", 0.0),
    "an exit before the function": ("import sys\nsys.exit(0)\n" + ADD, 0.0),
    "exit() before the function": ("exit()\n" + ADD, 0.0),
    "no function": ("raise SystemExit", 0.0),
    "os._exit before the function": ("import os\nos._exit(0)\n" + ADD, 0.0),
    "os._exit after the function": (ADD + "import os\nos._exit(0)", 0.0),
    "os._exit after a flush": (ADD + "import os\nprint(1, flush=True)\nos._exit(0)", 0.0),
    "sys.exit(1)": (ADD + "import sys\nsys.exit(1)", 0.0),
    "sys.exit(True)": (ADD + "import sys\nsys.exit(True)", 0.0),
    "a text": (ADD + "import sys\nsys.exit('done')", 0.0),
    "an error after an exit": (ADD + "import sys\ntry: sys.exit(0)\nfinally: 1 / 0", 0.0),
}

# The function ends the program, for any or some of its arguments: the share of the tests (0, 4711), (1, ...), (2, ...).
CALLED = {
    "sys.exit()": ("import sys\ndef add(a, b): sys.exit()", 0.0),
    "sys.exit(0)": ("import sys\ndef add(a, b): sys.exit(0)", 0.0),
    "sys.exit of the sum": ("import sys\ndef add(a, b): sys.exit(a + b)", 0.0),
    "sys.exit(False)": ("import sys\ndef add(a, b): sys.exit(False)", 0.0),
    "raise SystemExit": ("def add(a, b): raise SystemExit", 0.0),
    "raise SystemExit of the sum": ("def add(a, b): raise SystemExit(a + b)", 0.0),
    "exit()": ("def add(a, b): exit()", 0.0),
    "quit()": ("def add(a, b): quit()", 0.0),
    "prints and exits": ("import sys\ndef add(a, b):\n    print(a + b)\n    sys.exit(0)", 0.0),
    "os._exit(0)": ("import os\ndef add(a, b): os._exit(0)", 0.0),
    "os._exit(0) after a flush": ("import os\ndef add(a, b):\n    print(a + b, flush=True)\n    os._exit(0)", 0.0),
    "os._exit in a thread": (
        "import os, threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=os._exit, args=(0,)).start()\n    time.sleep(9)\n    return a + b",
        0.0,
    ),
    "exec": ("import os\ndef add(a, b): os.execv('/bin/true', ['true'])", 0.0),
    "exec of echo": ("import os\ndef add(a, b): os.execv('/bin/echo', ['echo', str(a + b)])", 0.0),
    "a generator's exit": ("import sys\ndef g():\n    sys.exit(0)\n    yield\ndef add(a, b): return next(g())", 0.0),
    "finally exits": ("import sys\ndef add(a, b):\n    try: return a + b\n    finally: sys.exit(0)", 0.0),
    "atexit of os._exit and an error": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise ValueError",
        0.0,
    ),
    "one of three exits": ("import sys\ndef add(a, b):\n    if a == 1: sys.exit(0)\n    return a + b", 2 / 3),
    "one of three ends the process": ("import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b", 2 / 3),
    "the last exits": ("import sys\ndef add(a, b):\n    if a == 2: sys.exit(0)\n    return a + b", 2 / 3),
    "caught": ("import sys\ndef add(a, b):\n    try: sys.exit(0)\n    except SystemExit: return a + b", 1.0),
    "finally returns": ("import sys\ndef add(a, b):\n    try: sys.exit(1)\n    finally: return a + b", 1.0),
    "suppressed": (
        "import contextlib, sys\ndef add(a, b):\n    with contextlib.suppress(SystemExit): sys.exit(0)\n"
        "    return a + b",
        1.0,
    ),
    "in a thread": (
        "import sys, threading\ndef add(a, b):\n    t = threading.Thread(target=sys.exit)\n    t.start()\n"
        "    t.join()\n    return a + b",
        1.0,
    ),
    "a child exits": (
        "import os, sys\ndef add(a, b):\n    if os.fork() == 0: sys.exit(0)\n    os.wait()\n    return a + b",
        1.0,
    ),
    "a child returns": ("import os\ndef add(a, b):\n    if os.fork(): os.wait()\n    return a + b", 1.0),
    "a child fails": ("import os\ndef add(a, b):\n    if os.fork() == 0: 1 / 0\n    os.wait()\n    return a + b", 1.0),
    "atexit of os._exit": (
        "import atexit, os\ndef add(a, b):\n    atexit.register(os._exit, 3)\n    return a + b",
        1.0,
    ),
    "a thread goes on": (
        "import threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    return a + b",
        1.0,
    ),
}
