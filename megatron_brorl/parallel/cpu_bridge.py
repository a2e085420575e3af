"""Lets Megatron-Core, which expects CUDA, run unmodified on a CPU. With CUDA this module changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_brorl.config.schema import ParallelConfig

# mallopt(3): M_TRIM_THRESHOLD = -1 never returns memory to the system, M_MMAP_MAX = 0 takes all blocks from the heap
# instead of mmap, and M_ARENA_MAX = 1 makes all threads use one heap.
_MALLOC = {-1: -1, -4: 0, -8: 1}


def on_gpu() -> bool:
    """Return whether torch has a CUDA device."""
    return torch.cuda.is_available()


def default_device() -> torch.device:
    """Return the device of this process: its CUDA device (LOCAL_RANK, set by the launcher) or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a CPU tensor on a device, by default the device of this process.

    A copy from pageable memory would wait until the device has finished its earlier work.
    """
    device = device or default_device()
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def wait() -> None:
    """Wait until the device has finished the work of this thread's stream."""
    if on_gpu():
        torch.cuda.current_stream().synchronize()


def order_kernels(config: ParallelConfig) -> None:
    """Let CUDA start kernels in the order of their launches if a layer communicates. Call this before CUDA starts.

    Megatron launches communication before the product that it overlaps with, and relies on this order on GPUs up to
    Hopper. A variable of the user takes precedence.
    """
    if config.tensor > 1 or config.context > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@lru_cache(maxsize=1)
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and there is a GPU for it."""
    return on_gpu() and importlib.util.find_spec("transformer_engine") is not None


def disable_compiler() -> None:
    """Import Megatron-Core without its use of torch.compile. Call this before any other import of it.

    Loading the compiler takes 2 to 3 seconds per process, and on a GPU the first steps compile again for each new
    stream length. With Transformer Engine, runs are long enough for the compiled SwiGLU, with half the memory traffic.
    """
    if has_transformer_engine():
        return
    compile_function, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core.jit  # noqa: F401  binds torch.compile, for all modules of Megatron
    finally:
        torch.compile = compile_function


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for later tensors, on CPUs. Call this before other threads start.

    By default glibc returns large blocks to the system, and the kernel has to clear each page again for a new tensor.
    With one arena, training also uses the memory that the engine's thread has freed. A phase with blocks of
    other sizes would grow the heap, so release_freed_memory() is called before it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: a C library without this function
    if mallopt and not on_gpu():
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def release_freed_memory() -> None:
    """Return freed memory to the device or, on a CPU, to the system: the next phase allocates blocks of other sizes."""
    if on_gpu():
        torch.cuda.empty_cache()
    elif malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


@lru_cache(maxsize=1)
def prepare() -> None:
    """Redirect the CUDA calls that Megatron-Core makes outside of tensor factories to the CPU. Idempotent."""
    from megatron.core.transformer.moe import moe_utils

    # The router reads this name, which Megatron-Core 0.16 does not define without Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if on_gpu():
        return
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    no_stream: Any = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    torch.cuda.current_stream = lambda *_: no_stream
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: None
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = no_stream
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _sizes_as_lists


def _sizes_as_lists(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Convert the sizes of messages to lists, as gloo requires, where Megatron copies them from a GPU."""
    if point == dispatcher.cuda_dtoh_point and dispatcher.ep_size > 1:
        dispatcher.input_splits = dispatcher.input_splits.tolist()
        dispatcher.output_splits = dispatcher.output_splits.tolist()
    return tokens_per_expert


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces device="cuda" by the CPU and reports tensor types as torch.cuda.*Tensor, as Megatron expects."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):  # Pinning needs an accelerator.
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def bridge() -> Iterator[None]:
    """Redirect CUDA to the CPU during a call of Megatron's schedules or optimizers."""
    if on_gpu():
        yield
    else:
        with _CudaMeansCpu():
            yield
