"""How pip builds the project: setuptools, with the torch that the extension is compiled against (PEP 517, 660).

A compiled extension fits one release of torch. Where the environment that pip installs into has a torch, it is that:
pip runs a build with the environment's interpreter, so that it can be found though an isolated build does not see it,
and nothing is downloaded. Where it has none, or the build has an environment of its own (uv, python -m build), the
build gets TORCH. In either case the wheel asks for the release that it was compiled against (setup.py).
"""

from __future__ import annotations

import site
import sys
from importlib import metadata
from typing import Any

from setuptools import build_meta

TORCH = "torch==2.13.0"


def folders() -> list[str]:
    """Where the packages of this interpreter's environment lie, whether or not this build sees them."""
    own = [] if sys.prefix != sys.base_prefix else [site.getusersitepackages()]
    return [*site.getsitepackages(), *own]


def torch_folders() -> list[str]:
    """Those that have torch."""
    return [x for x in folders() if next(iter(metadata.distributions(name="torch", path=[x])), None)]


def requirements(settings: Any = None) -> list[str]:
    """What pip installs for a build beside build-system.requires."""
    return [] if torch_folders() else [TORCH]


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = requirements


def _with_torch(name: str) -> Any:
    """The hook of setuptools by this name, which finds torch: behind everything that the build has of its own."""

    def hook(*arguments: Any, **options: Any) -> Any:
        sys.path += [x for x in torch_folders() if x not in sys.path]
        return getattr(build_meta, name)(*arguments, **options)

    return hook


prepare_metadata_for_build_wheel = _with_torch("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _with_torch("prepare_metadata_for_build_editable")
build_wheel = _with_torch("build_wheel")
build_editable = _with_torch("build_editable")
build_sdist = _with_torch("build_sdist")
