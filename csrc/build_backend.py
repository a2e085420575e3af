"""The PEP 517 and 660 build backend: setuptools, with the torch that the extension is compiled against.

A compiled extension fits one release of torch. If the environment that pip installs into has a torch, the build uses
it. pip runs the build with the environment's interpreter, so this module finds that torch even in an isolated build,
and nothing is downloaded. Otherwise, or if the build has its own environment (uv, python -m build), the build requires
TORCH. In both cases the wheel requires the release that it was compiled against (setup.py).
"""

from __future__ import annotations

import site
import sys
from importlib import metadata
from typing import Any

from setuptools import build_meta

TORCH = "torch==2.13.0"


def folders() -> list[str]:
    """Return the package folders of this interpreter's environment, even if the build does not see them."""
    user_folders = [] if sys.prefix != sys.base_prefix else [site.getusersitepackages()]
    return [*site.getsitepackages(), *user_folders]


def torch_folders() -> list[str]:
    """Return the folders that have torch."""
    return [x for x in folders() if next(iter(metadata.distributions(name="torch", path=[x])), None)]


def requirements(settings: Any = None) -> list[str]:
    """Return what pip installs for a build in addition to build-system.requires."""
    return [] if torch_folders() else [TORCH]


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = requirements


def _with_torch(name: str) -> Any:
    """Return the setuptools hook of this name. It finds torch after the packages of the build itself."""

    def hook(*arguments: Any, **options: Any) -> Any:
        sys.path += [x for x in torch_folders() if x not in sys.path]
        return getattr(build_meta, name)(*arguments, **options)

    return hook


prepare_metadata_for_build_wheel = _with_torch("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _with_torch("prepare_metadata_for_build_editable")
build_wheel = _with_torch("build_wheel")
build_editable = _with_torch("build_editable")
build_sdist = _with_torch("build_sdist")
