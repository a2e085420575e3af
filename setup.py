"""Everything is declared in pyproject.toml; this file is where csrc/ extensions are built."""

from setuptools import setup

setup()
