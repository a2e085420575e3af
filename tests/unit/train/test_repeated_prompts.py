"""A prompt that occurs twice in a step has two groups with separate random streams."""

from __future__ import annotations

import warnings
from dataclasses import replace

import fakes
import numpy as np
import pytest
import torch
from dist.steps import configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.data.source import FileSource
from megatron_brorl.errors import UserError
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.sampler import make_groups, requests
from megatron_brorl.train.evaluate import sample_answers

SEED = 3  # of dist.steps.BASE
TOKENS = 12


@pytest.mark.parametrize(("rows", "prompts"), [(10, 4), (7, 5), (3, 8), (1, 4)])
def test_groups_of_a_run_have_distinct_random_streams(rows, prompts):
    """Try 20 seeds over several epochs, with steps that span epochs or contain all rows and more."""
    repeats = 0
    for seed in range(20):
        source = FileSource(fakes.prompts(rows), seed)
        drawn = []
        for step in range(3 * rows // prompts + 3):
            taken = source.prompts(step * prompts, prompts)
            asked, _ = requests([(g, 0) for g in range(prompts)], make_groups(taken, step), {}, seed)
            assert [r.prompt for r in asked] == taken
            seen = set()
            for request in asked:
                # The stream of a prompt that does not repeat has no occurrence in its key.
                plain = stream_key(seed, step, request.prompt.id)
                assert (request.key == plain) == (request.prompt.id not in seen)
                seen.add(request.prompt.id)
                drawn += map(tuple, fakes.draws(request.key, range(2), TOKENS))
            repeats += prompts - len(seen)
        assert len(set(drawn)) == len(drawn)
    assert repeats >= 5


def trainer_of(model, processes, tmp_path, rows, **rollout):
    changes = {"rollout": {"n": 16, "prompts": 4, **rollout}, "run": {"dir": str(tmp_path)}}
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
    trainer.train_source = FileSource(fakes.prompts(rows), SEED)
    return trainer


def asked(trainer) -> list[list[tuple[str, int, int, int, list[int]]]]:
    """Return the requests of each call of the engine."""
    return [
        [(r.prompt.id, r.key, r.first, r.n, [b.index for b in r.begun]) for r in c]
        for c in trainer.runner.engine.engine.calls
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [{}, {"partial_tokens": 5}, {"refills": 2}], ids=["whole", "partial", "refilled"])
def test_repeated_prompts_resume_bit_exactly(processes, model, tmp_path, rollout):
    """Three rows in steps of four prompts: each step repeats one. Resuming after two steps is bit-exact."""
    whole = trainer_of(model, processes, tmp_path, 3, **rollout)
    whole.sync_weights()
    figures = [whole.train_step()[0] for _ in range(5)]
    for call in whole.runner.engine.engine.calls:
        for request in call:
            for begun in request.begun:  # by the key of the step that began it
                (stream,) = fakes.draws(request.key, [begun.index], TOKENS)
                assert begun.token_ids.tolist() == stream[: len(begun.token_ids)]
    assert any(r.begun for call in whole.runner.engine.engine.calls for r in call) == ("partial_tokens" in rollout)

    first = trainer_of(model, processes, tmp_path, 3, **rollout)
    first.sync_weights()
    got = [first.train_step()[0] for _ in range(2)]
    first.save()
    second = trainer_of(model, processes, tmp_path, 3, **rollout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # inside Megatron
        second.restore(checkpoint.find(tmp_path / "checkpoints"))
    assert second.state.carried.groups == first.state.carried.groups
    second.sync_weights()
    got += [second.train_step()[0] for _ in range(3)]
    assert list(map(repr, got)) == list(map(repr, figures))  # nan equals nan here; everything else must be equal
    assert asked(first) + asked(second) == asked(whole)
    weights = [trainer.models.actor.hf_tensors() for trainer in (whole, second)]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*weights, strict=True))


def rate(key: int, samples: int) -> float:
    """Return the share of right responses of a stream."""
    rows = fakes.draws(key, range(samples), TOKENS)
    return float(np.mean([fakes.STOP in r and sum(r[: r.index(fakes.STOP)]) % 2 == 0 for r in rows]))


def test_evaluation_separates_groups_of_one_prompt(processes, model, tmp_path):
    trainer = trainer_of(model, processes, tmp_path, 3)
    trainer.sync_weights()
    a, b = fakes.prompts(2)
    sampling = Sampling(1.0, 1.0, 0, TOKENS, (fakes.STOP,))
    found = sample_answers(trainer.runner, [a, b, a], 40, sampling)
    keys = [stream_key(SEED, "evaluate", *name) for name in (("p/0",), ("p/1",), (1, "p/0"))]
    assert [(x.prompt.id, x.index) for x in found] == [("p/0", 0), ("p/1", 1), ("p/0", 2)]
    assert [x.right / x.samples for x in found] == [rate(key, 40) for key in keys]
    assert found[0].right != found[2].right


def test_repeated_rollouts_name_the_engine(processes, model):
    """Run the built-in engine with a sampler that gives all rollouts the same random numbers."""

    def same(logits, keys, index, *rest):
        return sample_tokens(logits, keys, torch.zeros_like(index), *rest)

    trainer = make_trainer(model[0], processes, configured({"rollout": {"n": 4}}), None)
    shape = trainer.models.actor.shape
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, 100, same)
    trainer.runner = replace(trainer.runner, engine=type(trainer.runner.engine)(engine, 60.0))
    trainer.stop_ids = ()
    trainer.sync_weights()
    with pytest.raises(UserError, match=r"came several times for one prompt.* \(prompt p/\d: sibling 0\)") as caught:
        trainer.train_step()
    assert 'rollout.engine = "torch"' in str(caught.value)
    assert "start again with the other ops.implementation" in str(caught.value)
    assert "trtllm" not in str(caught.value)
