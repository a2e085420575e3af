"""State of a model and its optimizer in a training checkpoint.

The state of Megatron's distributed optimizer (ZeRO-1) is in its "dp_reshardable" format: each rank writes the part that
it owns. "fully_reshardable" would gather 12 bytes per parameter on every rank, 21 GB at 1.5B parameters. The price is
that the files follow the gradient buffers of one tensor-, pipeline- and expert-parallel layout, so only the
data-parallel size may differ when they are loaded.

With expert parallelism, Megatron chains two optimizers, the second one for the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.models.layers.lora import Adapters

_FORMAT = {"distrib_optim_sharding_type": "dp_reshardable"}
_EXPERTS = "experts_optimizer"  # key of the tensors of the experts' optimizer


@dataclass(frozen=True)
class ModelState:
    """A model and its optimizer, as a checkpoint stores them. The actor's name is "", so it keeps Megatron's names."""

    name: str
    module: Any
    optimizer: Any = None
    weights: dict[str, Tensor] | None = None  # by the module's names; replace the weights of the module

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names in the checkpoint."""
        return f"{self.name}." if self.name else ""

    def sharded(self, with_optimizer: bool, loading: bool = False) -> dict[str, Any]:
        """Return Megatron's sharded state. An optimizer that has not stepped has no state."""
        model: dict[str, Any] = self.module.sharded_state_dict(prefix=self.prefix)
        if self._has_adapters():  # The other weights are frozen.
            trained = [self.prefix + name for name, p in self.module.named_parameters() if p.requires_grad]
            model = {name: model[name] for name in trained}
        for name, weight in (self.weights or {}).items():
            model[self.prefix + name].data = weight
        if not with_optimizer:
            return {"model": model}
        if is_distributed(self.optimizer):
            return {"model": model, "optimizer": _distributed_state(self.optimizer, model, self.prefix, loading)}
        first, *experts = (x.sharded_state_dict(model, is_loading=loading) for x in self.optimizer.chained_optimizers)
        # Megatron would prefix the names of all tensors if there are two optimizers, which depends on the layout. Only
        # tensors of the second optimizer are stored, under the names that they have with a single optimizer.
        return {"model": model, "optimizer": first} | ({_EXPERTS: _tensors(*experts)} if experts else {})

    def _has_adapters(self) -> bool:
        return any(isinstance(module, Adapters) for module in self.module.modules())

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Load the state from `sharded` that Megatron filled. Without a saved state, the optimizer copies the weights.

        directory: for error messages.
        """
        model = {k.removeprefix(self.prefix): v for k, v in state["model"].items()}
        if self.weights is not None:
            for name, weight in self.weights.items():
                weight.copy_(model[name])
            return
        self.module.load_state_dict(model, strict=not self._has_adapters())
        if "optimizer" in state and is_distributed(self.optimizer):
            _restore_distributed(self.optimizer, state["optimizer"], directory)
        elif "optimizer" in state:
            first, *experts = self.optimizer.chained_optimizers
            for optimizer in experts:
                optimizer.load_state_dict(_complete(state[_EXPERTS], optimizer, state["optimizer"]))
            first.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()


def is_distributed(optimizer: Any) -> bool:
    """Return whether Megatron's optimizer is distributed over the data-parallel ranks."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def _distributed_state(optimizer: Any, model_state: dict[str, Any], prefix: str, loading: bool) -> dict[str, Any]:
    """Return the sharded state of a distributed optimizer.

    prefix: prepended to the keys of all tensors, because Megatron names them by buffer and not by parameter, which
    would give two models of a run the same keys.
    """
    if loading:
        initialise(optimizer)
    state: dict[str, Any] = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_FORMAT)

    # Megatron leaves the padding between parameters uninitialised, but equal states must give equal files.
    for part in _part_states(optimizer, state):
        for element in _elements(part["param_state"]):
            padding = element["padding"]
            if padding.unwrap() if isinstance(padding, LocalNonpersistentObject) else padding:
                for tensor in element.values():
                    if isinstance(tensor, ShardedTensor):
                        tensor.data.zero_()
    add_prefix_for_sharding(state, prefix)
    return state


def _restore_distributed(optimizer: Any, state: dict[str, Any], directory: Path) -> None:
    """Load the state that `_distributed_state` described and Megatron filled.

    Raises UserError if the gradient buffers differ from the saved ones.
    """
    # torch's Adam counts steps per parameter. Megatron stores one count with the parameter groups, but would then
    # overwrite it with the count that the optimizer had before loading.
    for part in _part_states(optimizer, state):
        step = part["optimizer"]["param_groups"][0].get("step")
        for element in _elements(part["param_state"]):
            if "step" in element:
                element["step"] = torch.as_tensor(step, dtype=torch.float32)
    try:
        with torch.no_grad():
            optimizer.load_state_dict(state)
    except AssertionError:
        raise UserError(
            f"{directory}: the optimizer state was saved with other gradient buckets; use the saved parallel.overlap "
            "and the saved number of ranks"
        ) from None

    # Megatron gives all parameters the same tensor, which every parameter would then increase in each step.
    for part in optimizer.chained_optimizers:
        for values in part.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].clone()


def initialise(optimizer: Any) -> None:
    """Allocate the state of an optimizer that has not stepped: zeros, as Adam would in its first step.

    Megatron needs the state to load. Saving it before the first step also saves the float32 masters, which cannot be
    recomputed from rounded weights.
    """
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for values in part.optimizer.state.values():
                values.setdefault("step", torch.zeros((), dtype=torch.float32))


def _part_states(optimizer: Any, state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the state of each optimizer in a chain, from the state of the chain."""
    return [state] if len(optimizer.chained_optimizers) == 1 else list(state.values())


def _torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer in the state of Megatron's, which may also have float32 masters."""
    return state.get("optimizer", state)


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded state of an optimizer without its settings and its step count."""
    inner = _torch_state(state)
    del inner["param_groups"]
    inner["state"].pop("common_step", None)
    return state


def _complete(state: dict[str, Any], optimizer: Any, first: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `_tensors` with the optimizer's settings and the step count in the state `first`."""
    inner, shared = _torch_state(state), _torch_state(first)
    inner["param_groups"] = optimizer.optimizer.state_dict()["param_groups"]
    # Megatron stores the step count of torch's Adam once. Transformer Engine's Adam has one in each group.
    if "common_step" in shared["state"]:
        inner["state"]["common_step"] = shared["state"]["common_step"]
    for group in inner["param_groups"]:
        group |= {key: value for key, value in shared["param_groups"][0].items() if key == "step"}
    return state


def _elements(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tensors of each parameter, and of each run of padding, in each bucket of each buffer."""
    for index, buffers in state.items():
        if isinstance(index, int):
            for buckets in buffers.values():
                for bucket in buckets:
                    yield from bucket
