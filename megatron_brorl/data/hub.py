"""Resolve names on the Hugging Face hub. Files are downloaded into the cache of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import CONFIG

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/(.+)")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]


def model_directory(name: str, key: str = "model.path") -> Path:
    """Return the folder of a model: `name` if it exists or cannot be a name on the hub, else its folder in the cache.

    key: the configuration key that holds it. Raises UserError if `name` is empty or a run, or if no model is found.
    """
    if not name.strip():
        raise UserError(f"{key} is empty: give a Hugging Face directory, or the name of a model on the hub")
    path = Path(name)
    if not (path / CONFIG).exists() and (path / "model" / CONFIG).exists():
        raise UserError(f"{name}: this is the folder of a run; give its model, {path / 'model'}")
    if path.exists() or not _NAME.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download  # Importing it takes a while.

    return Path(_download(name, f"{name} ({key})", lambda: snapshot_download(name, allow_patterns=_MODEL_FILES)))


def data_file(name: str) -> Path:
    """Return the file of hf://datasets/OWNER/NAME/FILE, or any other name as a path. Raises UserError if it fails."""
    if not name.startswith("hf://"):
        return Path(name).absolute()
    match = _FILE.fullmatch(name)
    if match is None:
        raise UserError(f"{name}: must be hf://datasets/OWNER/NAME/FILE, with a file of the data set's repository")
    from huggingface_hub import hf_hub_download

    repository, file = match.groups()
    command = f"--repo-type dataset {repository} {file}"
    return Path(_download(command, name, lambda: hf_hub_download(repository, file, repo_type="dataset")))


def _download(command: str, what: str, fetch: Callable[[], str]) -> str:
    """Call `fetch` and turn its errors into a UserError. command: arguments with which `hf download` does the same."""
    try:
        return fetch()
    except Exception as e:  # Several libraries raise here.
        reason = str(e).strip().partition("\n")[0].split(". ")[0] or type(e).__name__
        raise UserError(
            f"{what}: not found in {Path.cwd()} or in the cache of the hub, and the download failed ({reason}); "
            f"correct the path, or run with access to the network: hf download {command}"
        ) from None
