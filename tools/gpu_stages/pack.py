"""The checkout and the wheels that it needs as one archive, to be carried to a machine without a network."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from megatron_brorl.errors import UserError

LIMIT_MIB = 64
LEFT_OUT = ("docs/",)  # nothing on the way from the archive to a row reads them
FOLDER = "megatron-brorl"  # in the archive
NAMED = 3  # of the largest wheels, in a refusal


def pack(root: Path, target: Path, wheels: Path | None) -> int:
    """Write the archive (.tar.gz) and return its bytes: tracked files of the checkout `root`, new ones that git does
    not ignore, and every *.whl of `wheels` in a folder wheels/.

    Raises UserError, and leaves no file, where root is no git checkout, wheels has none, or it is above LIMIT_MIB.
    """
    if wheels and not list(wheels.glob("*.whl")):
        raise UserError(f"--wheels {wheels}: has no *.whl; fill it with pip download")
    given = sorted(wheels.glob("*.whl"), key=lambda path: -path.stat().st_size) if wheels else []

    # Beside its place, so that one of the same name stays where this one is refused.
    aside = target.with_name(f".{target.name}.writing")
    try:
        with tarfile.open(aside, "w:gz") as archive:
            for name in _files(root):
                archive.add(root / name, f"{FOLDER}/{name}", recursive=False)
            for path in given:
                archive.add(path, f"{FOLDER}/wheels/{path.name}", recursive=False)
        size = aside.stat().st_size
        if size > LIMIT_MIB * 2**20:
            largest = ", ".join(f"{p.name} ({p.stat().st_size / 2**20:.0f} MiB)" for p in given[:NAMED])
            remedy = f"leave out wheels; the largest are {largest}" if given else "the checkout itself is too large"
            raise UserError(f"{target}: would be {size / 2**20:.1f} MiB, above {LIMIT_MIB}: {remedy}")
        aside.rename(target)
    except OSError as e:
        raise UserError(f"{target}: cannot be written: {e.strerror}") from None
    finally:
        aside.unlink(missing_ok=True)
    return size


def _files(root: Path) -> list[str]:
    """Names of the files that go along."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{root}: is no git checkout, by which it is known what belongs to it: {done.stderr.strip()}")
    names = [name for name in done.stdout.split("\0") if name and not name.startswith(LEFT_OUT)]
    return [name for name in names if (root / name).is_file()]  # a deletion may not be committed yet
