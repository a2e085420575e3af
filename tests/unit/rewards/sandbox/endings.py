"""Programs that end in many ways, for test_run.py.

Each program of EXITS is harmless and reads nothing, so the test can run it outside a sandbox and compare.
"""

_THREAD = "import sys, threading\n"

# CPython decides whether one succeeds, and its output.
EXITS = {
    # Successful exits.
    "sys.exit(None)": "import sys\nprint('NO')\nsys.exit(None)",
    "an own subclass": "class Done(SystemExit): pass\nprint('NO')\nraise Done",
    "caught": "import sys\ntry:\n    sys.exit(1)\nexcept SystemExit:\n    print('NO')",
    "256": "import sys\nprint('NO')\nsys.exit(256)",
    "os._exit without a flush": "import os\nprint('NO')\nos._exit(0)",
    # Threads.
    "the thread prints after the main exit": _THREAD
    + "import time\ndef f():\n    time.sleep(0.05)\n    print('NO')\nthreading.Thread(target=f).start()\nsys.exit(0)",
    # Work at the end.
    "atexit prints without an exit": "import atexit\natexit.register(print, 'NO')",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)\nprint('NO')",
    "a generator is closed": "def g():\n    try: yield\n    finally: print('NO')\nx = g()\nnext(x)",
    # Text that is not flushed yet.
    "another sys.stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb'), write_through=False)\n"
    "print('NO')\nsys.exit(0)",
    "fast output": "import os, sys\nfrom io import BytesIO\nclass W:\n    def __init__(self, f):\n"
    "        self.b = BytesIO()\n"
    "        self.fd = f.fileno()\n    def write(self, s): self.b.write(s.encode())\n    def flush(self):\n"
    "        os.write(self.fd, self.b.getvalue())\n        self.b.truncate(0), self.b.seek(0)\n"
    "sys.stdout = W(sys.stdout)\nprint('NO')\nsys.exit(0)",
    "sys.stdout closed": "import sys\nprint('NO')\nsys.stdout.close()",
    # Input, threads and child processes.
    "at the end of the input": "import sys\nwhile True:\n    try: input()\n    except EOFError:\n        print('NO')\n"
    "        sys.exit(0)",
    "a daemon thread is left": _THREAD
    + "import time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\nprint('NO')\nsys.exit(0)",
    # Failures.
    "sys.exit(2 ** 100)": "import sys\nprint('NO')\nsys.exit(2 ** 100)",
    "sys.exit of a text": "import sys\nprint('NO')\nsys.exit('done')",
    "an error": "print('NO')\n1 / 0",
    "a signal": "import os, signal\nprint('NO', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)",
    "an own flush that fails": "import sys\nprint('NO', flush=True)\nclass W:\n    def write(self, s): pass\n"
    "    def flush(self): raise OSError\nsys.stdout = W()",
}

# Programs for the forms that call a function. Each defines add(a, b).

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

# Functions that end the program for some arguments, with the share of passed tests (0, 4711), (1, 4712), (2, 4713).
CALLED = {
    "sys.exit(0)": ("import sys\ndef add(a, b): sys.exit(0)", 0.0),
    "os._exit(0) after a flush": ("import os\ndef add(a, b):\n    print(a + b, flush=True)\n    os._exit(0)", 0.0),
    "os._exit in a thread": (
        "import os, threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=os._exit, args=(0,)).start()\n    time.sleep(9)\n    return a + b",
        0.0,
    ),
    "exec of echo": ("import os\ndef add(a, b): os.execv('/bin/echo', ['echo', str(a + b)])", 0.0),
    "finally exits": ("import sys\ndef add(a, b):\n    try: return a + b\n    finally: sys.exit(0)", 0.0),
    "one of three exits": ("import sys\ndef add(a, b):\n    if a == 1: sys.exit(0)\n    return a + b", 2 / 3),
    "caught": ("import sys\ndef add(a, b):\n    try: sys.exit(0)\n    except SystemExit: return a + b", 1.0),
    "a child exits": (
        "import os, sys\ndef add(a, b):\n    if os.fork() == 0: sys.exit(0)\n    os.wait()\n    return a + b",
        1.0,
    ),
    "a child returns": ("import os\ndef add(a, b):\n    if os.fork(): os.wait()\n    return a + b", 1.0),
    "a thread goes on": (
        "import threading, time\ndef add(a, b):\n"
        "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    return a + b",
        1.0,
    ),
}
