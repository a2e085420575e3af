"""What runs inside every worker of an SGLang engine: loads weights bucket by bucket, and checks what it loads.

SGLang imports `update` by its name, which --custom-weight-loader lists, in every worker and calls it as
update(model, named_tensors) (python/sglang/srt/model_executor/model_runner_components/weight_updater.py of 0.5.23,
WeightUpdater.update_weights_from_tensor). It throws away what the call returns, and an exception ends the scheduler's
process: a worker answers in a file. Not yet run on a GPU; tests run it in the contract double.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.rollout.remote.bucket_reader import BucketReader
from megatron_brorl.rollout.remote.cuda_ipc import own_device

LOADER = f"{__name__}.update"
_reader: BucketReader | None = None  # of the update in progress


def update(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do what a message of the leaf says: one tensor [bytes] of uint8, JSON with `kind` and the folder `answers`, where
    a file of this process's number then says what went wrong; empty: nothing did."""
    ((_, coded),) = named_tensors
    message = json.loads(coded.cpu().numpy().tobytes())
    try:
        with torch.no_grad():
            _KINDS[message["kind"]](model, message)
        wrong = ""
    except Exception as e:
        wrong = f"{type(e).__name__}: {e}"
    Path(message["answers"], str(os.getpid())).write_text(wrong)


def _begin(model: Any, message: Mapping[str, Any]) -> None:
    """A new version of the weights begins. What no bucket fills is seen by its NaNs: SGLang's load_weights says nothing
    of what it loaded."""
    global _reader
    on_gpu = torch.cuda.is_available()
    _reader = BucketReader(torch.cuda.current_device() if on_gpu else 0, own_device())
    for _, x in _filled(model):
        x.fill_(float("nan"))


def _load(model: Any, message: Mapping[str, Any]) -> None:
    """Load a bucket that is what was sent. Raises ValueError as BucketReader.read."""
    assert _reader
    model.load_weights(list(_reader.read(message["bucket"]).items()))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # the trainer's memory is its own again when this is answered


def _finish(model: Any, message: Mapping[str, Any]) -> None:
    """Raises ValueError as BucketReader.check_complete, and where a parameter of the model has a NaN."""
    assert _reader
    _reader.check_complete(message["names"])
    # SGLang joins what the trainer sends apart (queries, keys and values): one part of a parameter may be missing.
    unfilled = [name for name, x in _filled(model) if bool(x.isnan().any())]
    if unfilled:
        raise ValueError(
            f"{len(unfilled)} parameters of the engine were not filled or are NaN, for example {min(unfilled)}"
        )


def _filled(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, x.data) for name, x in model.named_parameters() if x.is_floating_point() and x.numel()]


_KINDS = {"begin": _begin, "load": _load, "finish": _finish}
