"""Reinforcement learning with verifiable rewards and hundreds of rollouts per prompt (BroRL) on Megatron-Core.

From Python (docs/python.md): Engine, score, train, Callback, StopTraining and load_run, with UserError for what their
caller can mend. Each is imported when it is first asked for; everything else is internal.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

from megatron_brorl.errors import UserError as UserError

__version__ = "0.1.0"

_PLACES = {
    "Callback": "megatron_brorl.train.callbacks",
    "Engine": "megatron_brorl.api.engine",
    "StopTraining": "megatron_brorl.train.callbacks",
    "load_run": "megatron_brorl.api.runs",
    "score": "megatron_brorl.api.scores",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES, "train"})


class _Train(ModuleType):
    """megatron_brorl.train is a function, and the folder of that name, which any import of it puts in its place."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Train in this process: megatron_brorl.api.training.train, told in docs/python.md."""
        return importlib.import_module("megatron_brorl.api.training").train(*arguments, **named)


# Warnings about Megatron-Core's own code, which a user of this package cannot act on. All others are shown. Most are
# given when Megatron-Core is imported, so the filters are set before any module of the package is.
_NO_USE_TO_A_USER: list[tuple[type[Warning], str]] = [
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back to "),
    (UserWarning, "full scope is deprecated. Use empty cuda_graph_(scope|modules)"),
    (UserWarning, "MimoModelConfig is experimental and still under active development"),
    (FutureWarning, "Please use DTensor instead and we are deprecating ShardedTensor"),
    (FutureWarning, "`load_state_dict` is deprecated and will be removed"),
]
for _category, _message in _NO_USE_TO_A_USER:
    warnings.filterwarnings("ignore", message=_message, category=_category)

# The folder is empty in itself: nothing else is imported here.
importlib.import_module(f"{__name__}.train").__class__ = _Train
