"""Recorded signatures of an engine's release, and a check of our calls against them.

A listing is recorded from the release's own files, with source and date, and never from our code, which would confirm
its own mistakes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LISTINGS = Path(__file__).parent / "listings"


class Listing:
    """The recorded interface of one release.

    signatures: parameters by function, or by class for its constructor; those after "*" are keyword-only. modules:
    names by module. members: members by enumeration, with their values if needed.
    """

    def __init__(self, name: str) -> None:
        recorded = json.loads((LISTINGS / f"{name}.json").read_text(encoding="utf-8"))
        self.release: str = recorded["release"]
        self.modules: Mapping[str, list[str]] = recorded["modules"]
        self.members: Mapping[str, Mapping[str, str] | list[str]] = recorded["members"]
        self.signatures: Mapping[str, list[str]] = recorded["signatures"]
        self.defaults: Mapping[str, float] = recorded.get("defaults", {})

    def parameters(self, name: str) -> list[str]:
        """Return the parameters of a function or constructor, including those of a function in "**Other"."""
        parameters: list[str] = []
        for parameter in self.signatures[name]:
            further = self.parameters(parameter[2:]) if parameter[:2] == "**" else [parameter]
            parameters += [p for p in further if p != "*" or "*" not in parameters]
        return parameters

    def refusal(self, name: str, positional: int, keywords: Sequence[str]) -> str:
        """Return why a call would fail, or ""."""
        if name not in self.signatures:
            return f"{name} is not in {self.release}"
        parameters = self.parameters(name)
        in_order = parameters[: parameters.index("*")] if "*" in parameters else parameters
        if positional > len(in_order):
            return f"{name} takes {len(in_order)} arguments in order, not {positional}"
        others = set(parameters) - set(in_order[:positional]) - {"*"}
        unknown = [k for k in keywords if k not in others]
        return f"{name} has no argument {', '.join(unknown)}" if unknown else ""


def problems(source: str, package: str, listing: Listing, holders: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Return the problems of this source text with the release, and the names of the checked calls.

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
    """Return the listing's name of a called function, or "" if it is not the engine's."""
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
    """Return the string keys of all dictionary displays and subscripts in a function, without nested displays."""
    tree = ast.parse(source)
    (body,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    dicts = [n for n in ast.walk(body) if isinstance(n, ast.Dict)]
    nested = [value for d in dicts for value in d.values]
    keys = [key for d in dicts if d not in nested for key in d.keys]
    keys += [n.slice for n in ast.walk(body) if isinstance(n, ast.Subscript)]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
