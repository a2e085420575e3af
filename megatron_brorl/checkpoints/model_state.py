"""State of a model and its optimizer in a training checkpoint.

The state of Megatron's distributed optimizer (ZeRO-1) is in its "dp_reshardable" format: each rank writes the part that
it owns. "fully_reshardable" would gather 12 bytes per parameter on every rank, 21 GB at 1.5B parameters. The price is
that the files follow the gradient buffers of one tensor- and pipeline-parallel layout, so only the data-parallel size
may differ when they are loaded.
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
from megatron_brorl.models.nonfinite import require_finite
from megatron_brorl.models.weights.names import global_parameters

_FORMAT = {"distrib_optim_sharding_type": "dp_reshardable"}


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

    def require_finite(self, what: str, then: str) -> None:
        """Raise UserError if a weight is NaN or infinite; a collective.

        what, then: text before and after the name of the weight in the message.
        """
        named = global_parameters(self.module) if self.weights is None else self.weights
        require_finite(named, f"{what}, {self.name or 'actor'}", then)

    def sharded(self, with_optimizer: bool, loading: bool = False) -> dict[str, Any]:
        """Return Megatron's sharded state. An optimizer that has not stepped has none."""
        model = self._weights_state()
        for name, weight in (self.weights or {}).items():
            model[self.prefix + name].data = weight
        if not with_optimizer:
            return {"model": model}
        if is_distributed(self.optimizer):
            optimizer = _distributed_state(self.optimizer, model, self.prefix, loading)
        else:
            optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading)
        return {"model": model, "optimizer": optimizer}

    def _weights_state(self) -> dict[str, Any]:
        """Return the sharded state of the weights: all of them, or only adapters if the others are frozen."""
        state: dict[str, Any] = self.module.sharded_state_dict(prefix=self.prefix)
        if self._trains_all():
            return state
        trained = [self.prefix + name for name, p in self.module.named_parameters() if p.requires_grad]
        return {name: state[name] for name in trained}

    def _trains_all(self) -> bool:
        return all(p.requires_grad for p in self.module.parameters())

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Load what `sharded` returned and Megatron filled. Without a saved state, the optimizer copies the weights.

        directory: for error messages.
        """
        model = {k.removeprefix(self.prefix): v for k, v in state["model"].items()}
        if self.weights is not None:
            for name, weight in self.weights.items():
                weight.copy_(model[name])
            return
        self.module.load_state_dict(model, strict=self._trains_all())
        if "optimizer" in state and is_distributed(self.optimizer):
            _restore_distributed(self.optimizer, state["optimizer"], directory)
        elif "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
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
    for element in _elements(state["param_state"]):
        if _value(element["padding"]):
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
    step = state["optimizer"]["param_groups"][0].get("step")
    for element in _elements(state["param_state"]):
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

    Megatron needs it for loading. Saving it before the first step also saves the float32 masters, which cannot be
    recomputed from rounded weights.
    """
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for values in part.optimizer.state.values():
                values.setdefault("step", torch.zeros((), dtype=torch.float32))


def _elements(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tensors of each parameter, and of each run of padding, in each bucket of each buffer."""
    for index, buffers in state.items():
        if isinstance(index, int):
            for buckets in buffers.values():
                for bucket in buckets:
                    yield from bucket


def _value(padding: Any) -> Any:
    return padding.unwrap() if isinstance(padding, LocalNonpersistentObject) else padding
