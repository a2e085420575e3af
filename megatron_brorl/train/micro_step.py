"""Forward and backward pass of one micro-batch with the run's own loss, and nothing changed by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_brorl.config.schema import AlgoConfig, OptimConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import device
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import Update, Worker
from megatron_brorl.types import Experience, Prompt

SIBLINGS = 2
_TOKENS = 8  # of a response, at most


class StillWorker(Worker):
    """A worker that takes the norm of its gradient in place of its optimizer's step."""

    def _step(self, lr: float) -> Update:
        with device.bridge():
            self.optimizer.prepare_grads()
            return Update(float(self.optimizer.get_grad_norm()), applied=False)


def micro_step(
    worker: StillWorker, prompt: Prompt, most: int, algo: AlgoConfig, optim: OptimConfig, temperature: float
) -> dict[str, float]:
    """Figures of an update on two siblings of `prompt` with opposite advantages; a collective.

    most: tokens of a response. Raises UserError where loss or gradient is not finite.
    """
    # Any tokens do; the prompt's own are in the vocabulary.
    ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
    count = min(most, _TOKENS)
    responses = tuple(ids.repeat(count)[i : i + count] for i in range(SIBLINGS))
    prompts = (ids,) * SIBLINGS

    # The engine is taken to have sampled what the actor computes.
    log_probs: tuple[Tensor, ...] = tuple(worker.log_probs(prompts, responses, temperature))
    experience = Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=tuple(torch.full((count,), sign) for sign in (1.0, -1.0)),
        # Of the policy that the reference still is.
        reference_log_probs=log_probs if algo.kl_coef else None,
    )
    # One mini-batch of one micro-batch, by the run's own update.
    found = update_policy(worker, experience, [list(range(SIBLINGS))], algo, optim, temperature, 0)

    # Left out rows would leave nothing to look at.
    if not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])) or found["nonfinite_rows"]:
        raise UserError(
            f"a forward and backward pass over 2 responses of {count} tokens: loss {found['loss']}, gradient norm "
            f"{found['grad_norm']}: not finite; look at the weights of model.path, or train in fp32 (model.dtype)"
        )
    return found
