"""No tests: responses with several blocks, or one in a strange place, and the program that a reader would take.

SCRIPTS answer a task with standard input and output, FUNCTIONS one that calls `add` or `Solution.add`. None stands for
no program.
"""

from __future__ import annotations


def fence(content: str, language: str = "python", mark: str = "```") -> str:
    """A closed block."""
    return f"{mark}{language}\n{content}\n{mark}\n"


MAIN = "n = int(input())\nprint(n * 2)"
SOLVE = (
    "import sys\n\ndef solve():\n    n = int(sys.stdin.readline())\n    print(2 * n)\n\n"
    "if __name__ == '__main__':\n    solve()"
)
BUFFER = "import sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.write(str(2 * int(data[0])))"
FIRST = "n = int(input())\nprint(n + n + 1)"
QUOTES = 'def doc():\n    """Example:\n\n```python\n>>> doc()\n```\n    """\n\nn = int(input())\nprint(n * 2)'
BARE_QUOTES = "TEXT = '''\n```\n{}\n```\n'''\nprint(TEXT.format(input()))"
FIVE = "5"
BOTH = "read = open(0).read\nprint(2 * int(read()))"

# name -> (response, program)
SCRIPTS = {
    "one block": (f"So:\n{fence(MAIN)}Done.", MAIN),
    "no language": (fence(MAIN, ""), MAIN),
    "py": (fence(MAIN, "py"), MAIN),
    "Python3": (fence(MAIN, "Python3"), MAIN),
    "a space before the language": (fence(MAIN, " python"), MAIN),
    "a title after the language": (fence(MAIN, 'python title="main.py"'), MAIN),
    "a file after the language": (fence(MAIN, "python:main.py"), MAIN),
    "pandoc's form": (fence(MAIN, "{.python .numberLines}"), MAIN),
    "R Markdown's form": (fence(MAIN, "{python}"), MAIN),
    "Windows lines": (fence(MAIN).replace("\n", "\r\n"), MAIN.replace("\n", "\r\n")),
    # Blocks after the program.
    "```output": (fence(MAIN) + "Output:\n" + fence(FIVE, "output"), MAIN),
    "```text": (fence(MAIN) + "It prints\n" + fence("10", "text"), MAIN),
    "```bash": (fence(MAIN) + "Run\n" + fence("echo 5 | python main.py", "bash"), MAIN),
    "```json": (fence(MAIN) + fence('{"n": 5}', "json"), MAIN),
    "```console": (fence(MAIN) + fence("$ python main.py\n5\n10", "console"), MAIN),
    "```pycon": (fence(MAIN) + fence(">>> solve()\n10", "pycon"), MAIN),
    "an input without a language": (fence(MAIN) + "Input:\n" + fence("3 4\n1 2", ""), MAIN),
    "an input that is Python": (fence(MAIN) + "Input:\n" + fence("5", ""), MAIN),
    "an input of several lines that is Python": (fence(MAIN) + "Input:\n" + fence("3\n1\n2\n3", ""), MAIN),
    "input and output without a language": (
        fence(MAIN) + "Input:\n" + fence("5", "") + "Output:\n" + fence("10", ""),
        MAIN,
    ),
    "an output that is a word": (fence(MAIN) + "Output:\n" + fence("YES", ""), MAIN),
    "an output that is a list": (fence(MAIN) + "Output:\n" + fence("[1, 2, 3]", ""), MAIN),
    "an output that is text": (fence(MAIN) + "Output:\n" + fence("Hello, world!", ""), MAIN),
    "an output marked as Python": (fence(MAIN) + "Output:\n" + fence("10"), MAIN),
    "an empty block": (fence(MAIN) + "```\n```\n", MAIN),
    "a comment": (fence(MAIN) + fence("# prints 10"), MAIN),
    "solve()": (fence(SOLVE) + "Call it:\n" + fence("solve()"), SOLVE),
    "print(solve())": (fence(SOLVE) + fence("print(solve())"), SOLVE),
    "an assert": (fence(SOLVE) + fence("assert double(5) == 10\nprint('ok')"), SOLVE),
    "an import of the solution": (fence(SOLVE) + fence("from solution import solve\nprint(solve())"), SOLVE),
    "a given standard input": (
        fence(SOLVE) + fence("import io, sys\nsys.stdin = io.StringIO('5')\nsolve()\nprint('done')"),
        SOLVE,
    ),
    "a copy with a given standard input": (
        fence(SOLVE) + fence("import io, sys\nsys.stdin = io.StringIO('5')\nn = int(input())\nprint(2 * n)"),
        SOLVE,
    ),
    "a subprocess": (
        fence(MAIN)
        + fence("import subprocess\nr = subprocess.run(['python', 'a.py'], input='5', text=True)\nprint(r.stdout)"),
        MAIN,
    ),
    "a part of the program": (fence(SOLVE) + "The key line:\n" + fence("print(2 * n)"), SOLVE),
    "how the input is read": (fence(MAIN) + "Note:\n" + fence("n, m = map(int, input().split())"), MAIN),
    "a function without its input": (
        fence(MAIN) + fence("def double(n):\n    return 2 * n\n\nprint(double(5))"),
        MAIN,
    ),
    "a program in C++": (fence(MAIN) + fence("int main() { int n; cin >> n; cout << 2 * n; }", "cpp"), MAIN),
    "C++ without a language": (fence(MAIN) + fence("int main() { int n; cin >> n; cout << 2 * n; }", ""), MAIN),
    "a table": (fence(MAIN) + fence("n | 2n\n--+---\n5 | 10", ""), MAIN),
    "the installation": (fence("pip install numpy") + fence(MAIN), MAIN),
    # Blocks before the program.
    "an example before": ("Input\n" + fence("5", "") + "Output\n" + fence("10", "") + "So\n" + fence(MAIN), MAIN),
    "a plan before": (fence("read n\nprint 2n", "text") + fence(SOLVE), SOLVE),
    "a helper before": (fence("def double(n):\n    return 2 * n") + fence(MAIN), MAIN),
    # Several programs.
    "a revised one": (f"{fence(FIRST)}Wait, that is off by one.\n{fence(MAIN)}", MAIN),
    "a revised one, then an output": (fence(FIRST) + fence(MAIN) + "Output:\n" + fence(FIVE, ""), MAIN),
    "a revised one that reads by sys.stdin": (fence(FIRST) + fence(BUFFER), BUFFER),
    "a revised one that reads by open(0)": (fence(FIRST) + fence(BOTH), BOTH),
    "a revised one with functions": (fence(FIRST) + fence(SOLVE), SOLVE),
    "the first is right": (fence(MAIN) + "Or:\n" + fence(FIRST), FIRST),
    "a revised one that does not compile": (fence(MAIN) + fence("n = int(input()\nprint(n * 2)"), MAIN),
    "one in Python 2": (fence("print raw_input() * 2") + fence(MAIN), MAIN),
    # Fences.
    "tildes": (fence(MAIN, "python", "~~~"), MAIN),
    "tildes, then backticks": (fence(MAIN, "python", "~~~") + fence(FIVE, ""), MAIN),
    "four backticks": (fence(MAIN, "python", "````"), MAIN),
    "backticks in tildes": (fence(QUOTES, "python", "~~~"), QUOTES),
    "three backticks in four": (fence(BARE_QUOTES, "python", "````"), BARE_QUOTES),
    "indented by two": ("1. So:\n  ```python\n  n = int(input())\n  print(n * 2)\n  ```\n", MAIN + "\n"),
    "indented by four": ("- So:\n\n    ```python\n    n = int(input())\n    print(n * 2)\n    ```\n", MAIN + "\n"),
    "indented by a tab": ("\t```python\n\tn = int(input())\n\tprint(n * 2)\n\t```\n", MAIN + "\n"),
    "indented, then an output": (
        "  ```python\n  n = int(input())\n  print(n * 2)\n  ```\n  ```\n  5\n  ```\n",
        MAIN + "\n",
    ),
    "the content alone is indented": ("```python\n  n = int(input())\n  print(n * 2)\n```\n", MAIN + "\n"),
    "the fence alone is indented": ("  ```python\nn = int(input())\nprint(n * 2)\n  ```\n", MAIN + "\n"),
    "a fence in a docstring": (fence(QUOTES), QUOTES),
    "a fence in a docstring, then an output": (fence(QUOTES) + "Output:\n" + fence(FIVE, ""), QUOTES),
    "bare fences in a string": (fence(BARE_QUOTES), BARE_QUOTES),
    "a fence in a line": ("s = '```'\n" + fence("s = '```'\nprint(input() + s)"), "s = '```'\nprint(input() + s)"),
    "code in a line": ("Use ```print``` and `input`.\n" + fence(MAIN), MAIN),
    "text after the closing fence": (f"```python\n{MAIN}\n``` That is it.\n", MAIN),
    "text after the closing fence, then an output": (f"```python\n{MAIN}\n``` It prints\n```output\n5\n```\n", MAIN),
    "an open fence, then a block": (f"```python\nn = int(\n\nNo:\n{fence(MAIN)}", MAIN),
    "an open program, then a block": (f"```python\n{FIRST}\n{fence(MAIN)}", MAIN),
    "an open fence at the end": (fence(MAIN) + "Output:\n```\n10", MAIN),
    "an open program at the end": (fence(MAIN) + f"Better:\n```python\n{FIRST}", MAIN),
    "only an open fence": (f"```python\n{MAIN}", None),
    "closed by another mark": (f"```python\n{MAIN}\n~~~\n", None),
    "Markdown around it": (f"```markdown\n# Solution\n{fence(MAIN)}```\n", MAIN),
    "answer tags around it": (f"<answer>\n{fence(MAIN)}</answer>", MAIN),
    # Thoughts.
    "a thought before": (f"<think>easy</think>\n{fence(MAIN)}", MAIN),
    "a thought that the template opened": (f"easy</think>\n{fence(MAIN)}", MAIN),
    "a block in the thought": (f"<think>{fence(FIRST)}</think>\n{fence(MAIN)}", MAIN),
    "only in the thought": (f"<think>\n{fence(MAIN)}</think>\nI give up.", None),
    "only in a thought that the template opened": (f"{fence(MAIN)}</think>\nI give up.", None),
    "only an output after the thought": (f"<think>\n{fence(MAIN)}</think>\nIt prints\n" + fence("10", "text"), None),
    "an open fence in the thought": (f"<think>```python\nn = 1</think>\n{fence(MAIN)}", MAIN),
    "an open bare fence in the thought": (f"<think>\n```\nn = 1\n</think>\n{fence(MAIN)}", MAIN),
    "an open fence in the thought, then an output": (
        f"<think>\n```python\n{FIRST}\n</think>\n{fence(MAIN)}" + fence(FIVE, ""),
        MAIN,
    ),
    "a thought that does not end": (f"<think>\n{fence(MAIN)}", None),
    "two thoughts": (f"<think>a</think>{fence(FIRST)}<think>{fence(FIRST)}</think>{fence(MAIN)}", MAIN),
    "nothing": ("", None),
    "no fence": (MAIN, None),
    "only a block of bash": (fence("echo 10", "bash"), None),
    "only blocks of other languages": (fence("echo 10", "bash") + fence("puts 10", "ruby"), None),
}

ADD = "def add(a, b):\n    return a + b"
OLD = "def add(a, b):\n    return a - b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
TYPED = (
    "try:\n    from operator import index\nexcept ImportError:\n    pass\nelse:\n"
    "    def add(a: int, b: int) -> int:\n        return a + b"
)
LAMBDA = "add = lambda a, b: a + b"
DOCTEST = 'def add(a, b):\n    """Add.\n\n```\nadd(1, 2)\n```\n    """\n    return a + b'

# name -> (response, function, program)
FUNCTIONS = {
    "one block": (fence(ADD), "add", ADD),
    "a call": (fence(ADD) + fence("print(add(1, 2))"), "add", ADD),
    "a call alone": (fence(ADD) + fence("add(1, 2)"), "add", ADD),
    "a usage that is a program": (fence(ADD) + fence("a, b = map(int, input().split())\nprint(a + b)"), "add", ADD),
    "an import of it": (fence(ADD) + fence("from solution import add\n\nprint(add(1, 2))"), "add", ADD),
    "asserts": (fence(ADD) + "Tests:\n" + fence("assert add(1, 2) == 3"), "add", ADD),
    "a test's function": (fence(ADD) + fence("def test_add():\n    assert add(1, 2) == 3\n\ntest_add()"), "add", ADD),
    "a name that has it inside": (fence(ADD) + fence("def add_all(*xs):\n    return sum(xs)"), "add", ADD),
    "an attribute of that name": (fence(ADD) + fence("s = set()\ns.add(3)\nprint(s)"), "add", ADD),
    "a local of that name": (fence(ADD) + fence("def f():\n    add = 1\n    return add\nprint(f())"), "add", ADD),
    "a method of that name": (fence(ADD) + fence(METHOD), "add", ADD),
    "an output": (fence(ADD) + fence("3", ""), "add", ADD),
    "```output": (fence(ADD) + fence("3", "output"), "add", ADD),
    "```bash": (fence(ADD) + fence("python add.py", "bash"), "add", ADD),
    "a session": (fence(ADD) + fence(">>> add(1, 2)\n3"), "add", ADD),
    "a revised one": (fence(OLD) + "Wait:\n" + fence(ADD), "add", ADD),
    "a revised one, then a call": (fence(OLD) + fence(ADD) + fence("print(add(1, 2))"), "add", ADD),
    "the first is right": (fence(ADD) + "Or:\n" + fence(OLD), "add", OLD),
    "a lambda": (fence(OLD) + fence(LAMBDA) + fence("add(1, 2)"), "add", LAMBDA),
    "in a branch": (fence(OLD) + fence(TYPED) + fence("add(1, 2)"), "add", TYPED),
    "async": (fence(OLD) + fence(f"async {ADD}") + fence("add(1, 2)"), "add", f"async {ADD}"),
    "only an import": (fence("from math import gcd") + fence("print(gcd(4, 6))"), "gcd", "from math import gcd"),
    "a method": (fence(METHOD) + fence("print(Solution().add(1, 2))"), "Solution.add", METHOD),
    "a method, then a stub of its class": (
        fence(METHOD) + fence("class Solution:\n    pass\nprint(Solution())"),
        "Solution.add",
        METHOD,
    ),
    "a method, then a function": (fence(METHOD) + fence(ADD), "Solution.add", METHOD),
    "an inherited method": (
        fence("class A:\n    add = int.__add__\nclass Solution(A): pass") + fence("Solution().add(1, 2)"),
        "Solution.add",
        "class A:\n    add = int.__add__\nclass Solution(A): pass",
    ),
    "a fence in a docstring": (fence(DOCTEST) + fence("add(1, 2)"), "add", DOCTEST),
    "a broken last one": (fence(ADD) + fence("def add(a, b) return a + b"), "add", ADD),
    "only in the thought": (f"<think>{fence(ADD)}</think>I give up.", "add", None),
    "an open fence in the thought": (f"<think>```python\ndef add(</think>\n{fence(ADD)}", "add", ADD),
    "tildes and backticks": (fence(ADD, "python", "~~~") + fence("add(1, 2)"), "add", ADD),
    "an open usage at the end": (fence(ADD) + "```python\nadd(1, 2)", "add", ADD),
}
