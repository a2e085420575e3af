"""A prompt that occurs twice in a step has two groups with separate random streams."""

from __future__ import annotations

from dataclasses import replace

import fakes
import numpy as np
import pytest
import torch
from dist.steps import configured, make_trainer

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
        responses = []
        for step in range(3 * rows // prompts + 3):
            step_prompts = source.prompts(step * prompts, prompts)
            slots = [(group, 0) for group in range(prompts)]  # the first rollout of each group
            step_requests, _ = requests(slots, make_groups(step_prompts, step), {}, seed)
            assert [r.prompt for r in step_requests] == step_prompts
            ids = set()
            for request in step_requests:
                # The stream of a prompt that does not repeat has no occurrence in its key.
                plain = stream_key(seed, step, request.prompt.id)
                assert (request.key == plain) == (request.prompt.id not in ids)
                ids.add(request.prompt.id)
                responses += map(tuple, fakes.draws(request.key, range(2), TOKENS))
            repeats += prompts - len(ids)
        assert len(set(responses)) == len(responses)
    assert repeats >= 5


def rate(key: int, samples: int) -> float:
    """Return the share of right responses of a stream."""
    rows = fakes.draws(key, range(samples), TOKENS)
    return float(np.mean([fakes.STOP in r and sum(r[: r.index(fakes.STOP)]) % 2 == 0 for r in rows]))


def test_evaluation_separates_groups_of_one_prompt(processes, model):
    trainer = make_trainer(model[0], processes, configured({}), fakes.Engine())
    trainer.sync_weights()
    a, b = fakes.prompts(2)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=TOKENS, stop_ids=(fakes.STOP,))
    answers = sample_answers(trainer.runner, [a, b, a], n=40, sampling=sampling)
    keys = [stream_key(SEED, "evaluate", *name) for name in (("p/0",), ("p/1",), (1, "p/0"))]  # 1: second group
    assert [(result.prompt.id, result.index) for result in answers] == [("p/0", 0), ("p/1", 1), ("p/0", 2)]
    assert [result.right / result.samples for result in answers] == [rate(key, 40) for key in keys]
    assert answers[0].right != answers[2].right


def test_repeated_rollouts_name_the_engine(processes, model):
    """Run the built-in engine with a sampler that gives all rollouts the same random numbers."""

    def sample_same(logits, keys, index, *rest):
        return sample_tokens(logits, keys, torch.zeros_like(index), *rest)

    trainer = make_trainer(model[0], processes, configured({"rollout": {"n": 4}}), engine=None)
    shape = trainer.models.actor.shape
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, max_rows=100, sample=sample_same)
    trainer.runner = replace(trainer.runner, engine=type(trainer.runner.engine)(engine, timeout_s=60.0))
    trainer.stop_ids = ()
    trainer.sync_weights()
    with pytest.raises(UserError, match=r"came several times for one prompt.* \(prompt p/\d: sibling 0\)") as caught:
        trainer.train_step()
    assert 'rollout.engine = "torch"' in str(caught.value)
    assert "start again with the other ops.implementation" in str(caught.value)
    assert "trtllm" not in str(caught.value)
