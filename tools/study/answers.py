"""What prompts came to, in the form that the table and the files of a warm start have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_brorl.algo.estimators import pass_at_k
from megatron_brorl.cli.build import Session
from megatron_brorl.train.evaluate import sample_answers
from megatron_brorl.train.rollouts import Rollouts
from megatron_brorl.train.setup import evaluation_sampling
from megatron_brorl.types import Prompt


def ask(
    session: Session, rollouts: Rollouts, prompts: Sequence[Prompt], samples: int, k: int, stream: str
) -> dict[str, Any]:
    """The columns of one prompt set at one evaluation; a collective.

    Random numbers are named by run.seed and `stream`, not by the step, so that evaluations are paired.
    """
    sampling = evaluation_sampling(session.config, session.stop_ids)
    answers = sample_answers(rollouts, prompts, samples, sampling, stream)
    fewest = min(a.samples for a in answers)
    return {
        "pass_at_1": _mean([a.right / a.samples for a in answers]),
        "k": k,
        "pass_at_k": _mean([pass_at_k(a.samples, a.right, k) for a in answers]) if fewest >= k else None,
        "response_tokens": _mean([a.tokens for a in answers]),
        "prompts": [a.prompt.id for a in answers],
        "right": [a.right for a in answers],
        "samples": [a.samples for a in answers],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
