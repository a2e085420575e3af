"""manifest.json: the SHA-256 of every other file of a directory, because nothing else notices a flipped byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_brorl.checkpoints import verified_files
from megatron_brorl.checkpoints.verified_files import sha256
from megatron_brorl.errors import UserError, shown
from megatron_brorl.json_files import read_object

MANIFEST = "manifest.json"


def write(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """The last thing that is written there. digests: of the files by name, as they were meant; None: as they lie there.

    Raises OSError where the disk refuses it.
    """
    if digests is None:
        digests = {p.relative_to(directory).as_posix(): sha256(p) for p in directory.rglob("*") if p.is_file()}
    text = json.dumps(dict(sorted(digests.items())), indent=1)
    verified_files.write(directory / MANIFEST, text.encode())


def damage(directory: Path) -> str:
    """What is wrong with a directory that has a manifest, or ought to; "" where nothing is.

    Raises OSError where the disk does not let it be read, which says nothing of the directory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_object(path)
    except UserError:
        return f"{MANIFEST} is not readable"
    for name, digest in manifest.items():
        if not (name.isprintable() and len(name) <= 255 and (directory / name).is_file()):
            return f"{shown(name)[1:-1]} is missing"
        if sha256(directory / name) != digest:
            return f"{name} is damaged (its SHA-256 is not the one written)"
    return ""
