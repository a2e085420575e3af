"""Looks at verdicts: what is found in a response, what it is worth, and what a run asks for before it begins."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from keys.case import Place

from megatron_brorl.config.schema import Config
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.extract import extract
from megatron_brorl.rewards.pool import ScoreRequest
from megatron_brorl.rewards.sandbox import isolation
from megatron_brorl.rewards.scoring import Scorer
from megatron_brorl.rewards.startup import look_at, probe
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt, Rollout, Verdict

TEXTS = ("<answer>4</answer>", "It is \\boxed{5}.", "4", "<think>x</think>\n<answer>4</answer>")


def found(config: Config, place: Place) -> Any:
    """The answers in some responses, as data.verifier looks for them, and their scores."""
    entry = registry.entry("exact", "here", config.reward)
    row = VerifierRow(id="a", prompt="2 + 2", answer="4", metadata={})
    answers = [extract(text, entry.find, entry.max_chars) for text in TEXTS]
    scores = [registry.verifier("exact")(a.answer, row).reward if a.answer is not None else None for a in answers]
    return answers, scores


class Pool:
    """Gives every answer three quarters."""

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        verdict: Future[Verdict] = Future()
        verdict.set_result(Verdict(0.0 if request.answer is None else 0.75, "ok", ""))
        return verdict

    def cancel(self) -> None:
        pass


def credit(config: Config, place: Place) -> Any:
    """Rewards of a response that ended and of one that was cut off, both with partial credit; which are correct."""
    prompts = [Prompt("a", "", (5,), "4", "exact")]
    rollouts = [Rollout(i, torch.tensor([5, 6]), torch.zeros(2), end) for i, end in enumerate(("stop", "length"))]
    with Scorer(prompts, lambda ids: "<answer>4</answer>", (2,), Pool(), config.reward) as scorer:  # type: ignore[arg-type]
        for rollout in rollouts:
            scorer.finished(0, rollout)
        scores = scorer.scores([(0, 0), (0, 1)])
    return scores.rewards.tolist(), scores.right


def sandboxed(config: Config, place: Place) -> Any:
    """Whether programs may run where there is no sandbox."""
    place.monkeypatch.setattr(probe, "problem_seen_from", lambda _: "bubblewrap is missing")
    place.monkeypatch.setattr(isolation, "tell_workers", lambda *_: None)
    try:
        return look_at({"code"}, config.reward).unsandboxed
    finally:
        place.monkeypatch.undo()
        place.monkeypatch.chdir(place.folder)
