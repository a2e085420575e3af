"""Programs that try to leave a sandbox, to exhaust the machine or to pass a test without solving it.

Each program prints "breached" on success and "held" if it was refused. The programs of ENDLESS must be stopped. All can
use SEED, and SECRET, the path of a file outside the sandbox. Run them only in a sandbox.
"""

from __future__ import annotations

_TRY = """
def attempt(action):
    try:
        result = action()
    except BaseException as e:
        print("held")
    else:
        print("held" if result is False else "breached")
"""

# Programs that run until they are stopped or reach a limit.
ENDLESS = {
    "loop": "while True: pass",
    "ignore every signal": """
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "threads": """
import threading, time
n = 0
try:
    while n < 200:
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start(); n += 1
except RuntimeError: pass
print("breached" if n >= 200 else "held", flush=True)
time.sleep(1e6)
""",
    "memory": "x = []\nwhile True: x.append(bytearray((1 << 24) + SEED))",
    "memory of several": """
import os
for _ in range(12):
    try:
        if os.fork() == 0: break
    except OSError: pass
x = []
while True:
    try: x.append(bytearray(1 << 24))
    except MemoryError: pass
""",
    "stdout flood": "while True: print('x' * (10_000 + SEED))",
    "power tower": "print(9 ** 9 ** 9 ** 9)",
    "stop oneself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "daemon holding stdout": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1e6)
time.sleep(1e6)
""",
    "folders": """
import os
os.chdir("/tmp")
i = 0
while True:
    try: os.mkdir(f"d{SEED}-{i}")
    except OSError: pass
    i += 1
""",
}

# Programs that end at once, by a signal or by a limit.
CRASHING = {
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "recursion in C": "x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)\nimport sys; sys.setrecursionlimit(10 ** 9)\n"
    "def f(): return f()\nf()",
    "os._exit(0)": "import os; os._exit(0)",
    "kill all": "import os; os.kill(-1, 9)",
    "kill the parent": "import os; os.kill(os.getppid(), 9)",
}

# Programs whose action is refused.
REFUSED = {
    "kill process 1": "import os, time; os.kill(1, 9); time.sleep(0.2); print('held')",
    "read a file": "attempt(lambda: open(SECRET).read())",
    "read /etc/passwd": "attempt(lambda: open('/etc/passwd').read())",
    "list the root": "import os; attempt(lambda: bool(set(os.listdir('/')) & {'home', 'root', 'etc', 'var', 'proc'}))",
    "environment": "import os; attempt(lambda: any('BRORL' in k or 'TOKEN' in k or k == 'HOME' for k in os.environ))",
    "/proc": "import os; attempt(lambda: os.listdir('/proc'))",
    "write /": "attempt(lambda: open('/x', 'w').write('x'))",
    "write /dev": "attempt(lambda: open('/dev/x', 'w').write('x'))",
    "write the guard": "import sys; attempt(lambda: open(sys.path[0] + '/x', 'w').write('x'))",
    "write Python": "import os; attempt(lambda: open(os.__file__, 'a').write('x'))",
    "fill /tmp": "attempt(lambda: [open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20)) for i in range(100)])",
    "huge file": "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "attempt(lambda: open('/tmp/x', 'wb').truncate(1 << 40))",
    "symlink out": "import os; os.symlink(SECRET, '/tmp/link'); attempt(lambda: open('/tmp/link').read())",
    "mknod": "import os, stat; attempt(lambda: os.mknod('/tmp/n', stat.S_IFBLK | 0o666, os.makedev(8, 0)))",
    "setuid": "import os; attempt(lambda: os.setuid(0))",
    "TCP": "import socket; attempt(lambda: socket.create_connection(('127.0.0.1', 22), 0.2))",
    "UNIX socket": "import socket; attempt(lambda: socket.socket(socket.AF_UNIX))",
    "memfd": "import os; attempt(lambda: os.memfd_create('x'))",
    "ptrace": "import ctypes; attempt(lambda: ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0)",
    "unshare": "import ctypes; attempt(lambda: ctypes.CDLL(None).unshare(0x10000000) == 0)",
    "clone": "import ctypes, platform\n"
    "number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "attempt(lambda: ctypes.CDLL(None).syscall(number, 0x10000000 | 17, 0, 0, 0, 0) >= 0)",
    "mount": "import ctypes; attempt(lambda: ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)",
    "keyring": "import ctypes, platform\n"
    "number = {'x86_64': 250, 'aarch64': 219}[platform.machine()]\n"
    "attempt(lambda: ctypes.CDLL(None).syscall(number, 0, -3, 1) >= 0)",
    "pick a file descriptor": "import os, ctypes\n"
    "attempt(lambda: ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 0, 0) >= 0)",
    "raise limits": "import resource; attempt(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (10 ** 4, 10 ** 4)))",
    "signals outside": "import os\n"
    "for pid in range(2, 4000 + SEED):\n    try: pid in (os.getpid(), os.getppid()) or os.kill(pid, 0)\n"
    "    except OSError: continue\n    if pid not in (os.getpid(), os.getppid()): print('breached')\nprint('held')",
    "devices": "import os; attempt(lambda: bool(set(os.listdir('/dev')) & {'vda', 'sda', 'kvm', 'fuse', 'mem'}))",
    "set-user-id": "import subprocess\n"
    "attempt(lambda: subprocess.run(['/usr/bin/su', '-c', 'true'], capture_output=True).returncode == 0)",
}

# Programs that try to pass without solving the test. They cannot know its expected output, 4711.
FORGING = {
    "pickle": "import pickle, sys\n"
    "class P:\n    def __reduce__(self): return (print, ('unpickled',))\n"
    "sys.stdout.buffer.write(pickle.dumps(P()))",
    "orphan that prints": "import os, time\n"
    "if os.fork() == 0:\n    time.sleep(0.05 + SEED / 1e5)\n    print('1', flush=True)",
    "unicode": "import sys; sys.stdout.buffer.write(bytes(range(256)) * 10)",
    "nested JSON": "print('[' * 100_000)",
}
ALL = {**ENDLESS, **CRASHING, **REFUSED, **FORGING}


def program(name: str, seed: int, secret: str) -> str:
    """Return the program of an attack. seed: varies it slightly."""
    return f"SEED = {seed}\nSECRET = {secret!r}\n{_TRY}{ALL[name]}\n"
