"""Recorded rollouts, against the fake engine's samples and float64 formulas."""

from __future__ import annotations

import hashlib
import warnings

import fakes
import numpy as np
import pytest
import torch
from by_hand import responses, right
from dist.steps import configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.data.source import FileSource
from megatron_brorl.rollout_log import LogEntry, entries, read_groups, read_rollouts
from megatron_brorl.train import recorder
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.types import Episode, PromptGroup, Rollout, ScoredRollout

N, PROMPTS, TOKENS, SEED = 8, 5, 12, 3
SAMPLED = {"n": N, "prompts": PROMPTS, "max_tokens": TOKENS}


def trainer_of(model, grid, folder, run=None, **sections):
    run = {"seed": SEED, "dir": str(folder.parent), **(run or {})}
    config = configured({"rollout": SAMPLED, "run": run} | sections)
    trainer = make_trainer(model[0], grid, config, fakes.Engine())
    folder.mkdir(exist_ok=True)
    trainer.recorder = Recorder(folder, config, fakes.Tokenizer().decode, (fakes.STOP,), grid.rank)
    trainer.sync_weights()
    return trainer


def in_order_of_hash(prompts) -> list[str]:
    return sorted((p.id for p in prompts), key=lambda i: hashlib.blake2b(i.encode(), digest_size=8).digest())


def test_step_is_recorded(processes, model, tmp_path):
    """All groups are listed. Two of them have all rollouts with their advantages over the kept rollouts of the step."""
    trainer = trainer_of(model, processes, tmp_path / "rollouts", {"record_groups": 2})
    trainer.train_step()
    figures, seconds = trainer.train_step()
    assert seconds["record"] > 0
    prompts = fakes.prompts(PROMPTS, PROMPTS)
    rows = [responses(SEED, p, N, TOKENS, stream=1) for p in prompts]
    rewards = np.array([list(map(right, group)) for group in rows])
    kept = [i for i, r in enumerate(rewards) if 0 < r.sum() < N]

    groups = read_groups(tmp_path / "rollouts", LogEntry("step", 1)).to_pylist()
    assert [g["prompt_id"] for g in groups] == [p.id for p in prompts]
    assert [g["right"] for g in groups] == rewards.sum(1).tolist()
    assert [g["rollouts"] for g in groups] == [N] * PROMPTS
    assert [i for i, g in enumerate(groups) if g["trained"]] == kept
    assert {g["outcome"] for i, g in enumerate(groups) if i in kept} == {"mixed"}
    answers = [{" ".join(map(str, r[:-1])) if r[-1] == fakes.STOP else None for r in group} for group in rows]
    assert [g["distinct"] for g in groups] == list(map(len, answers))
    assert [g["tokens"] for g in groups] == pytest.approx([np.mean(list(map(len, group))) for group in rows])
    chosen = in_order_of_hash(prompts)[:2]
    assert {g["prompt_id"]: g["recorded"] for g in groups if g["recorded"]} == dict.fromkeys(chosen, N)
    assert {g["prompt_id"] for g in groups if g["prompt"] is not None} == set(chosen)

    # Advantages are relative to the group's mean and whitened over the trained rollouts.
    centred = rewards[kept] - rewards[kept].mean(1, keepdims=True)
    advantages = dict(zip(kept, centred / centred.std(), strict=True))
    recorded = read_rollouts(tmp_path / "rollouts", LogEntry("step", 1)).to_pylist()
    assert len(recorded) == 2 * N
    for r in recorded:
        group, i = r["group"], r["sibling"]
        row = rows[group][i]
        assert r["prompt_id"] == prompts[group].id
        assert r["token_ids"] == row
        assert r["tokens"] == len(row)
        assert r["log_probs"] == pytest.approx([fakes.log_prob(t, 1) for t in row], rel=1e-6)
        assert r["versions"] == [{"version": 1, "tokens": len(row)}]
        assert (r["reward"], r["right"]) == (rewards[group, i], bool(rewards[group, i]))
        if group in kept:
            assert r["advantage"] == pytest.approx(advantages[group][i], rel=1e-5, abs=1e-6)
        else:
            assert r["advantage"] is None

        # The verifier got the text without its last token. It did not get responses that were cut off.
        stopped = row[-1] == fakes.STOP
        text = " ".join(map(str, row[:-1] if stopped else row))
        assert (r["text"], r["answer"], r["finish"]) == ((text, text, "stop") if stopped else (text, None, "length"))
        if stopped:
            assert (r["reason"], r["status"], r["score"]) == (f"judged {text!r}", "ok", rewards[group, i])
            assert dict(r["parts"]) == {"even": rewards[group, i], "words": 1 / (1 + len(text.split()))}
        else:
            assert (r["reason"], r["status"], r["score"], r["parts"]) == ("cut off", "no_answer", 0.0, [])
    assert figures["rollouts"] == N * PROMPTS


def test_turns_are_the_parts_of_the_mask(tmp_path):
    """Four rollouts of the same tokens: without an environment, with three turns, with one turn, and of an agent.

    The answer is in the last turn. The agent's rollout has two sequences and a text that is scored.
    """
    ids = [5, 6, fakes.STOP, 80, 7, fakes.STOP, 81, fakes.STOP, 8, fakes.STOP]
    masks = (None, [True] * 3 + [False] + [True] * 2 + [False] * 2 + [True] * 2, [True] * 10)
    turns = [("5 6", True), ("80", False), ("7", True), ("81", False), ("8", True)]
    episodes = [mask and Episode(torch.tensor(mask), turns=3) for mask in masks]
    episodes.append(Episode(torch.tensor(masks[1]), turns=3, starts=(0, 6), text="own"))
    rows = [Rollout(i, torch.tensor(ids), torch.zeros(10), "stop", ((0, 10),), e) for i, e in enumerate(episodes)]
    recorder = Recorder(tmp_path, configured({"reward": {"extract": "full"}}), fakes.Tokenizer().decode, (2,), rank=0)
    groups = [PromptGroup(fakes.prompts(1)[0], round=0, index=0)]
    scored = [ScoredRollout(0, r, reward=0.0, right=False) for r in rows]
    recorded = recorder._table(scored, groups, torch.zeros(1, 4)).to_pylist()
    full_text = " ".join(map(str, ids[:-1]))
    assert [(r["text"], r["token_ids"], r["sampled"]) for r in recorded] == [
        (full_text, ids, mask) for mask in (*masks, masks[1])
    ]
    assert [r["answer"] for r in recorded] == [full_text, "8", full_text, "own"]
    recorded_turns = [r["turns"] and [(turn["text"], turn["sampled"]) for turn in r["turns"]] for r in recorded]
    assert recorded_turns == [None, turns, [(full_text, True)], turns]
    assert [turn["sequence"] for r in recorded[1:] for turn in r["turns"]] == [0] * 6 + [0, 0, 0, 1, 1]


def test_recording_does_not_change_training(processes, model, tmp_path, monkeypatch):
    """Check that a recorder changes no metrics and no weights, and drops the last siblings at its token limit."""
    monkeypatch.setattr(recorder, "MAX_TOKENS", 60)
    recorded = trainer_of(model, processes, tmp_path / "rollouts", {"record_groups": 3})
    bare = trainer_of(model, processes, tmp_path / "bare")
    bare.recorder = None
    assert [repr(t.train_step()[0]) for t in (recorded, recorded)] == [repr(bare.train_step()[0]) for _ in range(2)]
    weights = dict(bare.models.actor.hf_tensors())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in recorded.models.actor.hf_tensors())
    for step in range(2):
        prompts = fakes.prompts(PROMPTS, PROMPTS * step)
        chosen = in_order_of_hash(prompts)[:3]
        lengths = [list(map(len, responses(SEED, p, N, TOKENS, stream=step))) for p in prompts if p.id in chosen]
        siblings = max(n for n in range(N + 1) if sum(sum(row[:n]) for row in lengths) <= 60)
        rollouts = read_rollouts(tmp_path / "rollouts", LogEntry("step", step)).to_pylist()
        assert {(r["prompt_id"], r["sibling"]) for r in rollouts} == {(c, i) for c in chosen for i in range(siblings)}
        assert 0 < siblings < N


def test_resumed_run_records_the_same_bytes(processes, model, tmp_path):
    """Rollouts that were scored before the checkpoint keep their scores and weight versions. A prompt occurs twice."""
    rollout = SAMPLED | {"partial_tokens": 5}
    undisturbed = trainer_of(model, processes, tmp_path / "undisturbed", rollout=rollout)
    first, second = (trainer_of(model, processes, tmp_path / "resumed", rollout=rollout) for _ in range(2))
    for trainer in (undisturbed, first, second):
        trainer.train_source = FileSource(fakes.prompts(PROMPTS - 1), SEED)
    for _ in range(5):
        undisturbed.train_step()
    for _ in range(2):
        first.train_step()
    first.save()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # inside Megatron
        second.restore(checkpoint.find(tmp_path / "checkpoints"))
    second.sync_weights()
    for _ in range(3):
        second.train_step()
    expected = {path.name: path.read_bytes() for path in (tmp_path / "undisturbed").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "resumed").iterdir()} == expected
    after_resume = read_rollouts(tmp_path / "undisturbed", LogEntry("step", 2)).to_pylist()
    assert any(len(r["versions"]) > 1 for r in after_resume)
    scored_before = [r for r in after_resume if r["versions"][-1]["version"] < 2]
    assert scored_before
    assert all(r["reason"] == f"judged {r['text']!r}" for r in scored_before if r["finish"] == "stop")


def test_evaluation_is_recorded_and_printed(processes, model, tmp_path):
    trainer = trainer_of(model, processes, tmp_path / "rollouts", evaluate={"samples": 4})
    trainer.train_step()
    progress = fakes.Notes()
    evaluation = trainer.evaluate(progress)
    prompts = fakes.prompts(5, first=1000)
    samples = {p.id: responses(SEED, p, 4, TOKENS, stream="evaluate") for p in prompts}
    rows = {(prompt, i): row for prompt, siblings in samples.items() for i, row in enumerate(siblings)}
    assert entries(tmp_path / "rollouts") == [LogEntry("step", 0), LogEntry("evaluation", 1)]
    groups = read_groups(tmp_path / "rollouts", LogEntry("evaluation", 1)).to_pylist()
    assert [(g["prompt_id"], g["right"], g["trained"], g["recorded"]) for g in groups] == [
        (p.id, sum(map(right, samples[p.id])), False, 4) for p in prompts
    ]
    assert sum(g["right"] for g in groups) / (5 * 4) == pytest.approx(evaluation.pass_at_1.mean)
    recorded = read_rollouts(tmp_path / "rollouts", LogEntry("evaluation", 1)).to_pylist()
    assert {(r["prompt_id"], r["sibling"]): r["token_ids"] for r in recorded} == rows
    assert {r["advantage"] for r in recorded} == {None}

    # Three samples are printed, always of the same prompts.
    assert len(progress.notes) == 3
    for number, (note, prompt) in enumerate(zip(progress.notes, in_order_of_hash(prompts)[:3], strict=True), start=1):
        row = rows[prompt, 0]
        text = " ".join(map(str, [t for t in row if t != fakes.STOP]))
        if row[-1] == fakes.STOP:
            verdict = f"{'right' if right(row) else 'wrong'}, judged {text!r}"
        else:
            verdict = "wrong, cut off at rollout.max_tokens"
        assert note.splitlines()[0] == f"held-out sample {number}, prompt {prompt}: {verdict}"
        assert note.splitlines()[2].split() == ["response", *text.split()]
