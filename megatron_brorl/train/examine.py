"""One micro-batch by itself: its loss, its gradient, and what of it is not finite first.

The same code looks at it in the run and in `brorl replay`, which is why both come to the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.loss import PolicyTokens
from megatron_brorl.algo.policy_losses import PolicyLossSettings
from megatron_brorl.parallel import device
from megatron_brorl.parallel.batch import Packed
from megatron_brorl.train.worker import Worker


@dataclass(frozen=True)
class Examined:
    """What came of a micro-batch; tensors are on the CPU."""

    loss: Tensor  # scalar
    gradient_norm: Tensor  # scalar, of this micro-batch alone
    log_probs: Tensor  # [R] of its response tokens, nats
    entropy: Tensor  # [R] nats
    first: str  # the first tensor that is not finite, in the order of computation; "": all of them are

    def same_bits(self, other: Examined) -> bool:
        """Whether all values are the same, NaN with its bits too."""
        own, theirs = ([x.reshape(-1).view(torch.uint8) for x in e.values()] for e in (self, other))
        return all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))

    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Its tensors: loss and gradient norm (scalars), log-probabilities and entropy [R]."""
        return self.loss, self.gradient_norm, self.log_probs, self.entropy


def examine(
    worker: Worker, batch: Packed, tokens: PolicyTokens, settings: PolicyLossSettings, temperature: float
) -> Examined:
    """Forward and backward of one micro-batch of a model that this rank has whole; weights and optimizer stay.

    tokens: of the batch's response tokens [R], on the device. Nothing is summed over ranks.
    """
    # As an update begins, and before anything is computed: a weight that is not finite explains all the rest.
    worker.reload()
    worker.model.zero_grad_buffer()
    worker.optimizer.zero_grad()  # an update that was not applied has left its gradients
    found = [f"weight {name}" for name, p in worker.module.named_parameters() if not _finite(p)]

    # No reduction of gradients: other ranks have none of this micro-batch.
    with device.bridge(), worker.model.no_sync(), _first_output(worker.module, found):
        hidden = worker.actor.forward_packed(batch, worker.model)
        result = worker.actor.head(hidden, batch, temperature).policy_loss(tokens, settings)
        result.loss.backward()

    # What the loss is made of, for live tokens alone: a masked one may hold anything.
    live = tokens.weights != 0
    named = {**{k: v for k, v in vars(tokens).items() if v is not None}, "log_probs": result.log_probs}
    found += [f"{name} of a response token" for name, x in named.items() if not _finite(x[live])]
    found += ["loss"] if not _finite(result.loss) else []

    # Backwards from the loss, so the last parameters come first.
    gradients = {name: p.main_grad for name, p in worker.module.named_parameters() if p.requires_grad}
    found += [f"gradient of {name}" for name, x in reversed(gradients.items()) if not _finite(x)]
    # Finite ones may still overflow where they are squared.
    norm = torch.stack([torch.linalg.vector_norm(x) for x in gradients.values()]).norm().cpu()
    found += ["gradient norm"] if not _finite(norm) else []
    # The next update begins with zeros, and whatever is asked in between.
    worker.model.zero_grad_buffer()
    loss, log_probs, entropy = (x.detach().cpu() for x in (result.loss, result.log_probs, result.entropy))
    return Examined(loss, norm, log_probs, entropy, found[0] if found else "")


@contextlib.contextmanager
def _first_output(module: torch.nn.Module, found: list[str]) -> Iterator[None]:
    """Note the first module whose output is not finite; modules end in the order of computation."""

    def look(name: str) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            given = output if isinstance(output, tuple) else (output,)
            if not found and not all(_finite(x) for x in given if isinstance(x, Tensor)):
                found.append(f"output of {name or 'the model'}")

        return hook

    hooks = [part.register_forward_hook(look(name)) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all()) if x.is_floating_point() else True
