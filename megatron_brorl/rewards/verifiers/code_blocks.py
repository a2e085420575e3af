"""Find the fenced code blocks of a response and select the program. docs/sandbox.md states the rules.

`blocks_of` takes linear time and compiles nothing, so the trainer can call it. `program` needs a worker process.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import itertools
import re
import symtable
import sys
import textwrap
import warnings
from collections.abc import Iterator

# A line that can open or close a block: indentation, fence and info string.
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:(?:python|py)\d*)?")
_MAX_ENDS = 16  # fences to try as the end of one block
_UNTERMINATED = "unterminated triple-quoted"  # start of CPython's error message

# Code that prints, that reads standard input, and that replaces standard input by an example.
_PRINTS = re.compile(r"\b(?:p?print|stdout|__stdout__|write|writelines)\b")
_STDIN = r"\b(?:stdin|__stdin__|fileinput)\b|/dev/stdin|\b(?:open|fdopen|FileIO|read)\(\s*0\b"
_READS = re.compile(rf"\binput\s*\(|\b(?:iter|map)\(\s*input\b|{_STDIN}")
_FEEDS = re.compile(rf"\bstdin\s*=(?!=)(?!.*(?:{_STDIN}))")
_KNOWN = {*dir(builtins), "exit", "quit", "__file__"}  # names that every program has


def blocks_of(text: str) -> str | None:
    """Return the only Python block of a text, or the text from its first fence to its last, or None without blocks."""
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return None

    # If each block opens with a language and closes without one, the blocks are unambiguous. Otherwise `program` has to
    # compile them.
    pairs = list(zip(fences[::2], fences[1::2], strict=False))
    paired = len(fences) % 2 == 0 and all(_closes(*pair) and not _info(pair[1]) for pair in pairs)
    python = [pair for pair in pairs if _is_python(pair[0])]
    if paired and all(_info(opening) for opening, _ in pairs[1:]) and len(python) < 2:
        return _content(text, *python[0]) if python else None
    return text[fences[0].start() : fences[-1].end()]


def program(text: str, function: str | None, has_input: bool, prelude: str = "") -> str | None:
    """Return the program in a result of `blocks_of`, or None without a closed Python block.

    A text that compiles or has no fence is the program itself. function: name that the tests call, if any. has_input:
    whether any test has standard input. prelude: code that runs before the program.
    """
    if not _FENCE.search(text):
        return text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning of compiled blocks
        if _error(text) is None:
            return text
        blocks = list(_python_blocks(text))
        ranked = [(_rank(block, function, has_input, prelude), i) for i, block in enumerate(blocks)]
    return blocks[max(ranked)[1]] if blocks else None


def _rank(block: str, function: str | None, has_input: bool, prelude: str) -> tuple[int, ...]:
    """Return the rank of a block, () if it does not compile. The last block of the highest rank is the program."""
    if _error(block) is not None:
        return ()
    try:
        scope = symtable.symtable(block, "program", "exec")
        if function:
            path = function.split(".")
            defined = _definition(scope, path)
            # `class Solution` with the method defines 2 names. It ranks (1, 0, 1), which is above an import, (1, 0).
            method = _definition(scope, ["Solution", *path])[0] if len(path) == 1 and not defined[1] else 0
            return max(defined, (method // 2, 0, 1)) if method else defined
        reads = _READS.search(block) and not _FEEDS.search(block)
        complete = "import *" in block or _is_complete(scope, _names(prelude))
        return _PRINTS.search(block) is not None, complete, bool(reads and has_input)
    except (RecursionError, MemoryError):
        return ()


def _python_blocks(text: str) -> Iterator[str]:
    """Yield the closed blocks that are marked as Python or have no language."""
    fences = list(_FENCE.finditer(text))
    i = 0
    while i < len(fences):
        later = (j for j in range(i + 1, len(fences)) if _closes(fences[i], fences[j]))
        ends = list(itertools.islice(later, _MAX_ENDS))
        if not ends:
            i += 1
            continue
        end = ends[0]
        if _is_python(fences[i]):
            end = _end(text, fences, i, ends)
            yield _content(text, fences[i], fences[end])

        # A fence with a language opens a new block even if the previous block was not closed.
        i = end if _info(fences[end]) else end + 1


def _end(text: str, fences: list[re.Match[str]], start: int, ends: list[int]) -> int:
    """Return the index of the fence that ends a block: the first one that is not inside a string of the program."""
    for end in ends:
        error = _error(_content(text, fences[start], fences[end]))
        if error is None:
            return end
        if not error.startswith(_UNTERMINATED):
            break
    return ends[0]


def _closes(opening: re.Match[str], fence: re.Match[str]) -> bool:
    return fence["mark"].startswith(opening["mark"])


def _info(fence: re.Match[str]) -> str:
    return fence["info"].strip()


def _is_python(fence: re.Match[str]) -> bool:
    language = _LANGUAGE.match(fence["info"].lower())
    return bool(language and _PYTHON.fullmatch(language[1]))


def _content(text: str, opening: re.Match[str], closing: re.Match[str]) -> str:
    """Return the lines between two fences without the indentation of the block."""
    content = text[opening.end() + 1 : closing.start()]
    if width := len(opening["indent"]):
        content = re.sub(rf"^[ \t]{{1,{width}}}", "", content, flags=re.MULTILINE)
    return textwrap.dedent(content) if content.lstrip("\r\n").startswith((" ", "\t")) else content


def _error(block: str) -> str | None:
    """Return the compiler's error message for a block, or None."""
    try:
        compile(block, "program", "exec", dont_inherit=True)
    except SyntaxError as e:
        return e.msg
    except (ValueError, OverflowError, RecursionError, MemoryError) as e:
        return type(e).__name__
    return None


def _definition(scope: symtable.SymbolTable, path: list[str]) -> tuple[int, ...]:
    """Return how many names of a path such as Class.method are defined, and 1 if the first is not an import."""
    first, *rest = path
    symbol = scope.lookup(first) if first in scope.get_identifiers() else None
    if symbol is None or not (symbol.is_assigned() or symbol.is_imported()):
        return 0, 0
    classes = [child for child in scope.get_children() if child.get_name() == first and child.get_type() == "class"]
    inner = max((_definition(child, rest)[0] for child in classes), default=0) if rest else 0
    return 1 + inner, int(not symbol.is_imported())


@functools.lru_cache(maxsize=64)
def _names(prelude: str) -> frozenset[str]:
    """Return the global names that a prelude defines or imports, also by `import *` from the standard library."""
    symbols = symtable.symtable(prelude, "prelude", "exec").get_symbols()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    for node in ast.walk(ast.parse(prelude)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in sys.stdlib_module_names:
            module = importlib.import_module(node.module)
            names.update(getattr(module, "__all__", dir(module)))
    return frozenset(names)


def _is_complete(module: symtable.SymbolTable, supplied: frozenset[str]) -> bool:
    """Return whether all global names that a block uses are defined or imported there, builtins or supplied."""
    scopes = [module]
    used = set()
    known = _KNOWN | supplied
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        symbols = [symbol for symbol in scope.get_symbols() if scope is module or symbol.is_global()]
        known |= {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
        used |= {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return used <= known
