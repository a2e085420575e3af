"""Run tests of tests/gpu on the emulated kernels: `run_cases.py PYTEST_ARGUMENTS`."""

from __future__ import annotations

import os
import sys

import pytest
from emulation import build

os.environ[build.ENVIRONMENT_VARIABLE] = "1"
os.environ.pop("PYTEST_ADDOPTS", None)
os.chdir(build.ROOT)
sys.exit(pytest.main(["-q", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", *sys.argv[1:]]))
