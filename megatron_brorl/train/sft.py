"""Supervised training on reference answers (`brorl sft`), a warm start for RL."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.data.prompts import sft_examples
from megatron_brorl.data.source import PromptSource
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.models.gpt import Head
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.tracking.metrics import MetricsWriter
from megatron_brorl.tracking.progress import Progress
from megatron_brorl.train.learning_rate import learning_rate
from megatron_brorl.train.worker import Worker

WARMUP_STEPS = 10
WEIGHT_DECAY = 0.01


def sft_optim(config: SftConfig, optim: OptimConfig) -> OptimConfig:
    """Return the optimizer of supervised training: that of [optim] with the learning rate of [sft].

    Its learning rate follows optim.lr_schedule over the sft.steps optimizer steps.
    """
    return replace(optim, lr=config.lr, warmup_steps=WARMUP_STEPS, weight_decay=WEIGHT_DECAY)


def sft(
    worker: Worker,
    source: PromptSource,
    tokenizer: Tokenizer,
    config: SftConfig,
    optim: OptimConfig,
    writer: MetricsWriter | None,
    progress: Progress,
) -> None:
    """Train config.steps optimizer steps on demonstrations, or on the reference answers, each followed by EOS.

    Observations in demonstrations are not trained on. Raises UserError if loss, gradient or weights are not finite.
    """
    grid = worker.grid
    for step in range(config.steps):
        start = time.monotonic()

        # Each replica trains on its share of the examples; the loss is the mean over the tokens of all.
        batch = source.prompts(step * config.examples_per_step, config.examples_per_step)
        examples = sft_examples(batch, tokenizer)[grid.dp_rank :: grid.dp_size]
        prompts = [torch.tensor(prompt) for prompt, _ in examples]
        responses = [torch.tensor(response.token_ids) for _, response in examples]
        trained_masks = [torch.tensor(response.trained) for _, response in examples]
        # All ranks divide by the same number, so their gradients are summed.
        own_tokens = float(sum(int(mask.sum()) for mask in trained_masks))
        tokens = collectives.all_reduce_sum({"tokens": own_tokens}, grid.groups.dp)["tokens"]

        lr = learning_rate(optim, step, config.steps)
        loss_function = _loss(trained_masks, tokens)
        update, losses = worker.train(prompts, responses, loss_function, worker.head(temperature=1.0), lr)
        # Only the last pipeline stage has losses; the others add 0.
        loss = collectives.all_reduce_sum({"loss": float(sum(losses))}, grid.groups.pp, grid.groups.dp_cp)["loss"]

        # The model is exported at the end, so a step that is not finite ends the run.
        if not (update.applied and math.isfinite(loss)):
            raise UserError(
                f"sft step {step + 1}: loss {loss}, gradient norm {update.grad_norm}: not finite; nothing is exported: "
                "lower sft.lr"
            )
        # A finite gradient can still make a weight infinite.
        worker.require_finite(f"sft step {step + 1}", "nothing is exported: lower sft.lr")

        seconds = {"step": time.monotonic() - start}
        if writer:
            writer.write(step, {"loss": loss, "grad_norm": update.grad_norm, "lr": lr, "tokens": tokens}, seconds)
        progress.update(step + 1, {"loss": f"{loss:.3f}", "grad norm": f"{update.grad_norm:.2f}"})


def _loss(trained_masks: Sequence[Tensor], divisor: float) -> Any:
    """Return the loss -sum log p / divisor; trained_masks: [G] bool per example; divisor: tokens of all replicas."""

    def loss(batch: Packed, head: Head) -> tuple[Tensor, float]:
        log_probs = head.log_probs()[0]
        is_trained = batch.gather(trained_masks).bool().to(log_probs.device)
        value = -log_probs[is_trained].sum() / divisor
        return value, float(value.detach())

    return loss
