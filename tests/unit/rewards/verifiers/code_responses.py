"""Responses for the tests of verifier `code`, each with the program that a human reader would take from it.

The responses have several code blocks, or one in an unusual place. SCRIPTS answer tasks with standard input and output.
FUNCTIONS answer tasks that call a function or a method, such as `add` or `Solution.add`. None means that the response
does not contain a program.
"""

from __future__ import annotations


def fence(content: str, language: str = "python", mark: str = "```") -> str:
    """Return a closed block."""
    return f"{mark}{language}\n{content}\n{mark}\n"


MAIN = "n = int(input())\nprint(n * 2)"
SOLVE = (
    "import sys\n\ndef solve():\n    n = int(sys.stdin.readline())\n    print(2 * n)\n\n"
    "if __name__ == '__main__':\n    solve()"
)


FIRST = "n = int(input())\nprint(n + n + 1)"
QUOTES = 'def doc():\n    """Example:\n\n```python\n>>> doc()\n```\n    """\n\nn = int(input())\nprint(n * 2)'
BARE_QUOTES = "TEXT = '''\n```\n{}\n```\n'''\nprint(TEXT.format(input()))"
FIVE = "5"
GIVEN = "import io, sys\nsys.stdin = io.StringIO('5')\nn = int(input())\nprint(2 * n)"

# name -> (response, program)
SCRIPTS = {
    "one block": (f"So:\n{fence(MAIN)}Done.", MAIN),
    "pandoc's form": (fence(MAIN, "{.python .numberLines}"), MAIN),
    "Windows lines": (fence(MAIN).replace("\n", "\r\n"), MAIN.replace("\n", "\r\n")),
    # Blocks after the program.
    "```bash": (fence(MAIN) + "Run\n" + fence("echo 5 | python main.py", "bash"), MAIN),
    "an input that is Python": (fence(MAIN) + "Input:\n" + fence("5", ""), MAIN),
    "an output marked as Python": (fence(MAIN) + "Output:\n" + fence("10"), MAIN),
    "solve()": (fence(SOLVE) + "Call it:\n" + fence("solve()"), SOLVE),
    "a copy with a given standard input": (fence(SOLVE) + fence(GIVEN), SOLVE),
    "a part of the program": (fence(SOLVE) + "The key line:\n" + fence("print(2 * n)"), SOLVE),
    # Blocks before the program.
    "a helper before": (fence("def double(n):\n    return 2 * n") + fence(MAIN), MAIN),
    # Several programs.
    "a revised one": (f"{fence(FIRST)}Wait, that is off by one.\n{fence(MAIN)}", MAIN),
    "the first is right": (fence(MAIN) + "Or:\n" + fence(FIRST), FIRST),
    "a revised one that does not compile": (fence(MAIN) + fence("n = int(input()\nprint(n * 2)"), MAIN),
    # Fences.
    "three backticks in four": (fence(BARE_QUOTES, "python", "````"), BARE_QUOTES),
    "a fence in a docstring, then an output": (fence(QUOTES) + "Output:\n" + fence(FIVE, ""), QUOTES),
    "bare fences in a string": (fence(BARE_QUOTES), BARE_QUOTES),
    "text after the closing fence, then an output": (f"```python\n{MAIN}\n``` It prints\n```output\n5\n```\n", MAIN),
    "an open program, then a block": (f"```python\n{FIRST}\n{fence(MAIN)}", MAIN),
    "an open program at the end": (fence(MAIN) + f"Better:\n```python\n{FIRST}", MAIN),
    "only an open fence": (f"```python\n{MAIN}", None),
    # Thoughts.
    "a block in the thought": (f"<think>{fence(FIRST)}</think>\n{fence(MAIN)}", MAIN),
    "only in the thought": (f"<think>\n{fence(MAIN)}</think>\nI give up.", None),
    "an open fence in the thought": (f"<think>\n```python\n{FIRST}\n</think>\n{fence(MAIN)}{fence(FIVE, '')}", MAIN),
    "a thought that does not end": (f"<think>\n{fence(MAIN)}", None),
    "only a block of another language": (fence("echo 10", "bash"), None),
}

ADD = "def add(a, b):\n    return a + b"
OLD = "def add(a, b):\n    return a - b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
GCD = "from math import gcd\nclass Solution:\n    def gcd(self, a): return gcd(a, 6)"
INHERITS = "class A:\n    add = int.__add__\nclass Solution(A): pass"


LAMBDA = "add = lambda a, b: a + b"


# name -> (response, function, program)
FUNCTIONS = {
    "a usage that is a program": (fence(ADD) + fence("a, b = map(int, input().split())\nprint(a + b)"), "add", ADD),
    "a test's function": (fence(ADD) + fence("def test_add():\n    assert add(1, 2) == 3\n\ntest_add()"), "add", ADD),
    "a local of that name": (fence(ADD) + fence("def f():\n    add = 1\n    return add\nprint(f())"), "add", ADD),
    "a method of that name": (fence(ADD) + fence(METHOD), "add", ADD),
    "a revised one, then a call": (fence(OLD) + fence(ADD) + fence("print(add(1, 2))"), "add", ADD),
    "the first is right": (fence(ADD) + "Or:\n" + fence(OLD), "add", OLD),
    "a lambda": (fence(OLD) + fence(LAMBDA) + fence("add(1, 2)"), "add", LAMBDA),
    "only an import": (fence("from math import gcd") + fence("print(gcd(4, 6))"), "gcd", "from math import gcd"),
    "a method": (fence(METHOD) + fence("print(Solution().add(1, 2))"), "Solution.add", METHOD),
    "a class as on LeetCode": (fence(METHOD) + fence("print(Solution().add(1, 2))"), "add", METHOD),
    "a class whose method uses an import": (fence(GCD) + fence("from math import gcd"), "gcd", GCD),
    "a class that inherits": (fence(INHERITS) + fence("add(1, 2)"), "add", INHERITS),
}
