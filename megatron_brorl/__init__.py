"""Reinforcement learning with verifiable rewards and hundreds of rollouts per prompt (BroRL) on Megatron-Core.

The public names are Engine, score, train, Callback, StopTraining, load_run and UserError (docs/python.md). Each is
imported on first use. Everything else is internal.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

from megatron_brorl.errors import UserError as UserError

__version__ = "0.3.0"

_PUBLIC = {
    "Callback": "megatron_brorl.train.callbacks",
    "Engine": "megatron_brorl.api.engine",
    "StopTraining": "megatron_brorl.train.callbacks",
    "load_run": "megatron_brorl.api.runs",
    "score": "megatron_brorl.api.scores",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "train"})


class _Train(ModuleType):
    """The package megatron_brorl.train as a function. Importing the package would replace a function of that name."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Train in this process; see megatron_brorl.api.training.train."""
        return importlib.import_module("megatron_brorl.api.training").train(*arguments, **named)


# Warnings about Megatron-Core's own code, which users cannot act on. Most are raised when it is imported, so the
# filters are set before any other module of the package is imported.
for _category, _message in (
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to "),
    (UserWarning, "full scope is deprecated. Use empty cuda_graph_(scope|modules)"),
    (UserWarning, "MimoModelConfig is experimental and still under active development"),
    (FutureWarning, "Please use DTensor instead and we are deprecating ShardedTensor"),
    (FutureWarning, "`load_state_dict` is deprecated and will be removed"),
):
    warnings.filterwarnings("ignore", message=_message, category=_category)

# The __init__ of megatron_brorl.train is empty, so this import is cheap.
importlib.import_module(f"{__name__}.train").__class__ = _Train
