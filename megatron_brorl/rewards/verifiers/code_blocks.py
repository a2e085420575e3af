"""The fenced blocks of a response, and which of them is the program. docs/sandbox.md states the rules.

`blocks_of` compiles nothing and is linear in the text, so the trainer can call it. `program` compiles the blocks: call
it in a scoring process.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import symtable
import sys
import textwrap
import warnings
from collections.abc import Iterator

# A line that may open or close a block: its indentation, its mark and what follows.
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:(?:python|py)\d*)?")
_MOST_ENDS = 16  # fences that are tried as the end of one block
_UNTERMINATED = "unterminated triple-quoted"  # how CPython's message begins

# What a program that reads or prints mentions.
_INPUT = {"input", "stdin", "__stdin__", "fileinput"}
_OPENS = {"open", "fdopen", "FileIO", "read"}  # with the number 0
_OUTPUT = {"print", "pprint", "stdout", "__stdout__", "write", "writelines"}

# What a program has besides its own names.
_KNOWN = {*dir(builtins), "exit", "quit", "__builtins__", "__file__"}
_LIBRARY = sys.stdlib_module_names


def blocks_of(text: str) -> str | None:
    """Return the content of a text's only Python block, or all from its first fence to its last; None: no block."""
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return None

    # Blocks that open with a language and close without one leave no doubt. Else only a compiler can tell what is what.
    pairs = list(zip(fences[::2], fences[1::2], strict=False))
    clear = len(fences) % 2 == 0 and all(_closes(*pair) and not _info(pair[1]) for pair in pairs)
    python = [pair for pair in pairs if _is_python(pair[0])]
    if clear and all(_info(opening) for opening, _ in pairs[1:]) and len(python) < 2:
        return _content(text, *python[0]) if python else None
    return text[fences[0].start() : fences[-1].end()]


def program(found: str, function: str | None, has_input: bool) -> str | None:
    """Return the program in what `blocks_of` found. A text that compiles or has no fence is the program itself.

    function: the name that the tests call, if they do. has_input: whether any test has a standard input.
    None where no block of Python is closed.
    """
    if not _FENCE.search(found):
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        if _error(found) is None:
            return found
        blocks = list(_python_blocks(found))
        ranked = [(_rank(block, function, has_input), i) for i, block in enumerate(blocks)]
    return blocks[max(ranked)[1]] if blocks else None


def _rank(block: str, function: str | None, has_input: bool) -> tuple[int, ...]:
    """Order the blocks of a response; the last one of the highest rank is the program. (): it does not compile."""
    if _error(block) is not None:
        return ()
    try:
        if function:
            return _definition(symtable.symtable(block, "program", "exec"), function.split("."))
        prints, complete, reads = _traits(ast.parse(block))
    except (RecursionError, MemoryError):
        return ()
    return prints, complete, reads and has_input


def _python_blocks(text: str) -> Iterator[str]:
    """Yield the contents of the closed blocks that are Python or name no language."""
    fences = list(_FENCE.finditer(text))
    i = 0
    while i < len(fences):
        later = (j for j in range(i + 1, len(fences)) if _closes(fences[i], fences[j]))
        ends = list(itertools.islice(later, _MOST_ENDS))
        if not ends:
            i += 1
            continue
        end = ends[0]
        if _is_python(fences[i]):
            end = _end(text, fences, i, ends)
            yield _content(text, fences[i], fences[end])

        # A fence with a language opens a block, also where the one before was left open.
        i = end if _info(fences[end]) else end + 1


def _end(text: str, fences: list[re.Match[str]], start: int, ends: list[int]) -> int:
    """Return the fence that ends a block: the first one, unless it is part of a string in the program."""
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
    """Return the lines between two fences without the indentation that is not the program's own."""
    content = text[opening.end() + 1 : closing.start()]
    if width := len(opening["indent"]):
        content = re.sub(rf"^[ \t]{{1,{width}}}", "", content, flags=re.MULTILINE)
    return textwrap.dedent(content) if content.lstrip("\r\n").startswith((" ", "\t")) else content


def _error(block: str) -> str | None:
    """Return why a block does not compile; None if it does."""
    try:
        compile(block, "program", "exec", dont_inherit=True)
    except SyntaxError as e:
        return e.msg
    except (ValueError, OverflowError, RecursionError, MemoryError) as e:
        return type(e).__name__
    return None


def _definition(scope: symtable.SymbolTable, path: list[str]) -> tuple[int, ...]:
    """Return (how many names of a path such as Class.method are defined here, whether the first is not imported)."""
    first, *rest = path
    symbol = scope.lookup(first) if first in scope.get_identifiers() else None
    if symbol is None or not (symbol.is_assigned() or symbol.is_imported()):
        return 0, 0
    classes = [child for child in scope.get_children() if child.get_name() == first and child.get_type() == "class"]
    inner = max((_definition(child, rest)[0] for child in classes), default=0) if rest else 0
    return 1 + inner, int(not symbol.is_imported())


def _traits(tree: ast.Module) -> tuple[bool, bool, bool]:
    """Return whether a block prints, whether it needs nothing of other blocks, and whether it reads its input."""
    nodes = list(ast.walk(tree))
    own = {name for node in nodes for name in _bound(node)}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    complete = (used <= own | _KNOWN or "*" in own) and {m for n in nodes for m in _modules(n)} <= _LIBRARY

    # A block that gives itself an input shows what another program does with it.
    prints = any(_mentions(node) & _OUTPUT for node in nodes)
    reads = any(_reads(node, own) for node in nodes) and not any(_feeds(node, own) for node in nodes)
    return prints, complete, reads


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a node gives a value, in whichever scope."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    fields = () if isinstance(node, ast.keyword) else ("name", "asname", "arg", "rest")
    names = (getattr(node, field, None) for field in fields)
    return {name.partition(".")[0] for name in names if isinstance(name, str)}


def _modules(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def _mentions(node: ast.AST) -> set[str]:
    """Return the names, attributes and imports that a node looks up."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        return {node.id if isinstance(node, ast.Name) else node.attr}
    return {node.name} if isinstance(node, ast.alias) else set()


def _reads(node: ast.AST, own: set[str]) -> bool:
    """Return whether a node looks up the standard input; `own` names are the block's, such as a parameter `input`."""
    if isinstance(node, ast.Constant):
        return node.value == "/dev/stdin"
    if isinstance(node, ast.Call) and node.args and _mentions(node.func) & _OPENS:
        return isinstance(node.args[0], ast.Constant) and type(node.args[0].value) is int and node.args[0].value == 0
    return bool(_mentions(node) & (_INPUT - own if isinstance(node, ast.Name) else _INPUT))


def _feeds(node: ast.AST, own: set[str]) -> bool:
    """Return whether a node assigns to sys.stdin what does not come from the standard input."""
    if not isinstance(node, ast.Assign):
        return False
    names = {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    return "stdin" in names and not any(_reads(part, own) for part in ast.walk(node.value))
