"""Names of Hugging Face's hub in place of paths: resolved to files of its cache, fetched where a network is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from megatron_brorl.errors import UserError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/(.+)")
_OF_A_MODEL = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"]


def model_directory(name: str) -> Path:
    """Return the folder of a model: `name` itself if it exists or cannot be a name of the hub, else the hub's cache.

    Raises UserError where `name` is empty, where the hub has no such model, or where it cannot be reached and the
    cache does not hold the model.
    """
    if not name.strip():
        raise UserError("model.path is empty: give a Hugging Face directory, or a model's name on the hub")
    if Path(name).exists() or not _NAME.fullmatch(name):
        return Path(name)
    from huggingface_hub import snapshot_download  # here because it takes a while to import

    return Path(_fetched(name, f"{name} (model.path)", lambda: snapshot_download(name, allow_patterns=_OF_A_MODEL)))


def data_file(name: str) -> Path:
    """The file that hf://datasets/OWNER/NAME/FILE stands for; another name is a path. Raises UserError as above."""
    if not name.startswith("hf://"):
        return Path(name).absolute()  # so that messages name it wherever they are read
    found = _FILE.fullmatch(name)
    if found is None:
        raise UserError(f"{name}: must be hf://datasets/OWNER/NAME/FILE, with a file of the data set's repository")
    from huggingface_hub import hf_hub_download

    repository, file = found.groups()
    command = f"--repo-type dataset {repository} {file}"
    return Path(_fetched(command, name, lambda: hf_hub_download(repository, file, repo_type="dataset")))


def _fetched(command: str, what: str, fetch: Callable[[], str]) -> str:
    """What `fetch` fetches. command: of `hf download`, which does the same by hand."""
    try:
        return fetch()
    except Exception as e:  # of the network, of the hub's answer, or of a cache that lacks it: of many libraries
        reason = " ".join(str(e).split()).split(". ")[0] or type(e).__name__
        raise UserError(
            f"{what}: neither in {Path.cwd()} nor in the cache of Hugging Face's hub, and not fetched: {reason}; "
            f"where there is a network, run: hf download {command}"
        ) from None
