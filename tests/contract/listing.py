"""What a named release of an engine has, recorded from its own files, and the calls of our leaves checked against it.

A listing holds facts about the release, with their source and the date. It is never made from our code: a mistake in
our reading of an interface would then agree with itself.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LISTINGS = Path(__file__).parent / "listings"


class Listing:
    """signatures: parameters by the name of a function, or of a class for its constructor. Those after "*" are given by
    keyword alone. modules: names by module. members: names by enumeration, with their values where these matter."""

    def __init__(self, name: str) -> None:
        held = json.loads((LISTINGS / f"{name}.json").read_text(encoding="utf-8"))
        self.release: str = held["release"]
        self.modules: Mapping[str, list[str]] = held["modules"]
        self.members: Mapping[str, Mapping[str, str] | list[str]] = held["members"]
        self.signatures: Mapping[str, list[str]] = held["signatures"]
        self.defaults: Mapping[str, float] = held.get("defaults", {})

    def parameters(self, name: str) -> list[str]:
        """Those of a function or constructor, with the ones that it hands on to another ("**Other")."""
        found: list[str] = []
        for parameter in self.signatures[name]:
            further = self.parameters(parameter[2:]) if parameter[:2] == "**" else [parameter]
            found += [p for p in further if p != "*" or "*" not in found]
        return found

    def refusal(self, name: str, positional: int, keywords: Sequence[str]) -> str:
        """Why a call of this would end in an error; "" where it would not."""
        if name not in self.signatures:
            return f"{name} is not in {self.release}"
        given = self.parameters(name)
        in_order = given[: given.index("*")] if "*" in given else given
        if positional > len(in_order):
            return f"{name} takes {len(in_order)} arguments in order, not {positional}"
        taken = set(given) - set(in_order[:positional]) - {"*"}
        unknown = [k for k in keywords if k not in taken]
        return f"{name} has no argument {', '.join(unknown)}" if unknown else ""


def problems(source: str, package: str, listing: Listing, holders: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """What in this source text would fail with the release, and the names of the calls that were looked at.

    holders: class of the release by the expression that holds one of its objects, such as self._llm.
    """
    tree = ast.parse(source)
    wrong, imported = [], set()
    for module, name in _imports(tree, package):
        if name not in listing.modules.get(module, []) and f"{module}.{name}" not in listing.modules:
            wrong.append(f"{module} has no {name}")
        imported.add(name)

    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in listing.members:
            if node.attr not in listing.members[node.value.id]:
                wrong.append(f"{node.value.id} has no {node.attr}")
        elif isinstance(node, ast.Call):
            name = _called(node.func, imported, holders)
            if name and name not in listing.members:
                seen.add(name)
                keywords = [k.arg for k in node.keywords if k.arg is not None]
                wrong.append(listing.refusal(name, len(node.args), keywords))
    return list(filter(None, wrong)), seen


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                yield node.module or "", alias.name


def _called(function: ast.expr, imported: set[str], holders: Mapping[str, str]) -> str:
    """The listing's name for what a call calls; "" where it is not the engine's."""
    if isinstance(function, ast.Name):
        return function.id if function.id in imported else ""
    if isinstance(function, ast.Attribute):
        holder = ast.unparse(function.value)
        if holder in holders:
            return f"{holders[holder]}.{function.attr}"
        if holder in imported:
            return f"{holder}.{function.attr}"
    return ""


def keys_of(source: str, function: str) -> set[str]:
    """The keys of all dictionaries that a function writes out."""
    tree = ast.parse(source)
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    dicts = [n for n in ast.walk(found) if isinstance(n, ast.Dict)]
    keys = [key for d in dicts for key in d.keys] + [n.slice for n in ast.walk(found) if isinstance(n, ast.Subscript)]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
