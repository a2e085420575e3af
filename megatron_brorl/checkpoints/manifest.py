"""manifest.json: the SHA-256 of every other file of a directory, because nothing else notices a flipped byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megatron_brorl.errors import UserError, shown
from megatron_brorl.json_files import read_object

MANIFEST = "manifest.json"


def write(directory: Path) -> None:
    """Hash every file under `directory`; the last thing that is written there."""
    digests = {p.relative_to(directory).as_posix(): _sha256(p) for p in sorted(directory.rglob("*")) if p.is_file()}
    (directory / MANIFEST).write_text(json.dumps(digests, indent=1), encoding="utf-8")


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
        if _sha256(directory / name) != digest:
            return f"{name} is damaged (its SHA-256 is not the one written)"
    return ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
