#!/usr/bin/env python3
"""Facts about how the package is built, counted from its source: rooms, imports, sizes, paragraphs, docstrings.

python tools/architecture.py            # the table of docs/architecture.md
python tools/architecture.py --list     # and the functions behind the figures
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_brorl"
LONG_BODY = 20  # lines of a body from which on its paragraphs are counted
PARAGRAPHS = 25  # lines from which on a body must have some
MANY_ARGUMENTS = 7


@dataclass(frozen=True)
class Function:
    """A function or method, with its own lines: those of functions inside it belong to it too."""

    path: Path
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: str  # the class it is a method of, or ""
    nested: bool  # inside another function
    body: list[str]  # lines after the docstring

    @property
    def name(self) -> str:
        return (
            f"{self.path.relative_to(ROOT)}:{self.node.lineno} {self.owner}{'.' if self.owner else ''}{self.node.name}"
        )

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def arguments(self) -> int:
        """Without self."""
        a = self.node.args
        count = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)
        return count - bool(self.owner and a.args and a.args[0].arg in ("self", "cls"))

    @property
    def public(self) -> bool:
        """Reachable from other files by a name without underscore; __init__ is told by its class."""
        return not (self.nested or self.node.name.startswith("_") or self.owner.startswith("_"))

    @property
    def blank(self) -> int:
        return sum(not line.strip() for line in self.body)

    @property
    def comments(self) -> int:
        """Lines with a comment, at their end or alone."""
        return sum(_has_comment(line) for line in self.body)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module by its dotted name."""
    return {
        ".".join(p.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): p
        for p in sorted(package.rglob("*.py"))
    }


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, inside functions too; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    """The part of the package that a module is in: "train" of megatron_brorl.train.loop."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def arrows(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports; packages themselves, which are empty, are left out."""
    found = modules(package)
    files = {m for m, p in found.items() if p.name != "__init__.py"}
    return {m: {t for t in imports(found[m]) if t in files and t != m} for m in files}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for every module at which a walk along the imports comes back to its own path."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and inner ones included."""
    lines = path.read_text(encoding="utf-8").splitlines()

    def walk(node: ast.AST, owner: str, nested: bool) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                body = child.body[1:] if ast.get_docstring(child) is not None else child.body
                # From the docstring on, because a comment may stand before the first statement.
                start = child.body[0].end_lineno if body is not child.body else body[0].lineno - 1
                own = lines[start : child.end_lineno] if body else []
                yield Function(path, child, owner, nested, own)
                yield from walk(child, "", True)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, child.name, nested)
            else:
                yield from walk(child, owner, nested)

    yield from walk(ast.parse("\n".join(lines)), "", False)


def without_docstring(found: list[Function]) -> list[Function]:
    """Public functions that say nothing. Methods that stand in a protocol or override one are told there: they count
    as told where a class of the package has a method of that name with a docstring."""
    told = {f.node.name for f in found if f.owner and ast.get_docstring(f.node) is not None}
    return [
        f for f in found if f.public and ast.get_docstring(f.node) is None and not (f.owner and f.node.name in told)
    ]


def without_shapes(found: list[Function]) -> list[Function]:
    """Public functions with a Tensor whose docstring says nothing of shapes: "[...]", "scalar" or "shape"."""
    silent = []
    for f in found:
        text = ast.get_docstring(f.node)
        told = text is not None and any(word in text for word in ("[", "scalar", "shape"))
        if f.public and text is not None and _has_tensor(f.node) and not told:
            silent.append(f)
    return silent


def _has_tensor(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether an argument or the result is a Tensor, alone or in a tuple, sequence or option."""
    a = node.args
    notes = [x.annotation for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + [node.returns]
    names = (n for note in notes if note is not None for n in ast.walk(note))
    return any(isinstance(n, ast.Name) and n.id == "Tensor" for n in names)


def _has_comment(line: str) -> bool:
    stripped = line.strip()
    return stripped.startswith("#") or ("  # " in line)


def facts(package: Path = PACKAGE) -> list[tuple[str, str]]:
    """The rows of the table."""
    found, graph = modules(package), arrows(package)
    sizes = sorted(len(p.read_text(encoding="utf-8").splitlines()) for p in found.values() if p.name != "__init__.py")
    every = [f for p in found.values() for f in functions(p)]
    bodies = [f for f in every if len(f.body) >= LONG_BODY]
    lines = sum(len(f.body) for f in bodies)
    longest = max(every, key=lambda f: f.lines)
    bare = [f for f in bodies if not f.blank and not f.comments]
    rooms = sorted({room(m) for m in graph} - {""})
    pairs = {(room(m), room(t)) for m, ts in graph.items() for t in ts if room(m) != room(t)}

    return [
        ("rooms (folders and single files)", str(len(rooms))),
        ("arrows between rooms", str(len(pairs))),
        ("modules", str(len(graph))),
        ("imports between modules", str(sum(map(len, graph.values())))),
        ("import cycles", str(len(cycles(graph)))),
        ("median lines of a file", f"{statistics.median(sizes):.0f}"),
        ("largest file", str(sizes[-1])),
        ("functions", str(len(every))),
        ("median lines of a function", f"{statistics.median(f.lines for f in every):.0f}"),
        ("longest function", f"{longest.lines} ({longest.name.partition(' ')[2]})"),
        (f"functions of {MANY_ARGUMENTS} or more arguments", str(sum(f.arguments >= MANY_ARGUMENTS for f in every))),
        (f"bodies of {LONG_BODY} lines or more", str(len(bodies))),
        ("blank lines per 100 in them", f"{100 * sum(f.blank for f in bodies) / lines:.1f}"),
        ("lines with a comment per 100 in them", f"{100 * sum(f.comments for f in bodies) / lines:.1f}"),
        ("of them with neither", str(len(bare))),
        ("public functions without docstring", str(len(without_docstring(every)))),
        ("public tensor functions whose docstring has no shape", str(len(without_shapes(every)))),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions that a figure counts")
    args = parser.parse_args()

    print("| | |\n|---|---|")
    for what, value in facts():
        print(f"| {what} | {value} |")

    if args.list:
        every = [f for p in modules().values() for f in functions(p)]
        bare = [f for f in every if len(f.body) >= LONG_BODY and not f.blank and not f.comments]
        dense = [f for f in every if len(f.body) >= PARAGRAPHS and not (f.blank and f.comments)]
        for title, chosen in [
            (f"{LONG_BODY} lines or more with neither blank line nor comment", bare),
            (f"{PARAGRAPHS} lines or more that lack blank lines or comments", dense),
            (f"{MANY_ARGUMENTS} or more arguments", [f for f in every if f.arguments >= MANY_ARGUMENTS]),
            ("without docstring", without_docstring(every)),
            ("without shapes", without_shapes(every)),
        ]:
            print(f"\n{title}:", *(f.name for f in chosen), sep="\n  ")


if __name__ == "__main__":
    main()
