"""What a step's sizes come to, in one line: the start of a run tells it."""

from __future__ import annotations

from megatron_brorl.config.schema import Config


def batch_line(config: Config, longest_prompt: int, limit: int, replicas: int, context: int) -> str:
    """Prompts x rollouts -> optimizer steps -> micro-batches.

    The number of micro-batches is that of responses that all have rollout.max_tokens, in groups that are all kept, and
    of replicas with equally many of them. longest_prompt: tokens. limit: tokens of a micro-batch on one rank. replicas:
    data-parallel size. context: ranks that a sequence is cut over.
    """
    c, a = config.rollout, config.algo
    rollouts, steps = c.prompts * c.n, a.mini_batches * a.epochs

    # A micro-batch is not closed while another of its rows would fit; a longer row has one of its own.
    fit = max(1, limit * context // (longest_prompt + c.max_tokens - 1))
    rows = -(-rollouts // (a.mini_batches * replicas))
    micro = -(-rows // fit)

    return (
        f"{_counted(c.prompts, 'prompt')} x {_counted(c.n, 'rollout')} = {rollouts:,} -> "
        f"{_counted(steps, 'optimizer step')} -> {'each ' if steps > 1 else ''}at most "
        f"{_counted(micro, 'micro-batch', 'es')} of up to {limit:,} tokens per rank"
    )


def _counted(count: int, name: str, plural: str = "s") -> str:
    return f"{count:,} {name}{plural if count != 1 else ''}"
