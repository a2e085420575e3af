"""Context length and sampling parameters from the configuration."""

from __future__ import annotations

from dataclasses import replace

from megatron_brorl.config.rules import replays_routes
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.rollout.engine import Sampling


def context(config: Config, shape: ModelShape) -> int:
    """Return the maximum of prompt plus response tokens. Raises UserError if a configured length does not fit."""
    limit = config.model.context or shape.context
    if limit > shape.context:
        raise UserError(
            f"model.context = {limit} exceeds max_position_embeddings = {shape.context} of {config.model.path}"
        )
    if config.rollout.max_tokens >= limit:
        raise UserError(
            f"rollout.max_tokens = {config.rollout.max_tokens} leaves no room for a prompt in a context of {limit}"
        )
    return limit


def training_sampling_params(config: Config, stop_ids: tuple[int, ...], experts: int) -> Sampling:
    """Return the sampling parameters of training. experts: of a layer, 0 for a dense model."""
    r = config.rollout
    sampling = Sampling(r.temperature, r.top_p, r.top_k, r.max_tokens, stop_ids, config.stop_strings, r.partial_tokens)
    return replace(sampling, routes=replays_routes(config, experts), shares_prefixes=not config.agent.function)


def evaluation_sampling_params(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """Return the sampling parameters of evaluation."""
    e, r = config.evaluate, config.rollout
    sampling = Sampling(e.temperature, e.top_p, top_k=0, max_tokens=r.max_tokens, stop_ids=stop_ids, log_probs=False)
    return replace(sampling, stop_strings=config.stop_strings, shares_prefixes=not config.agent.function)
