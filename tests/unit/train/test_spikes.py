"""Spikes: the rule against medians taken by hand, and a run that ends by it, saved, and goes on as if it had not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import fakes
import pytest
import tiny
from dist.steps import _Silent, configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.config.schema import TrainConfig
from megatron_brorl.errors import UserError
from megatron_brorl.train.spikes import Spikes

NAN = float("nan")
CONFIG = TrainConfig(spike_factor=3.0, spike_window=4, max_spike_steps=2)


def figures(norm, **changes):
    return {"loss": 0.0, "grad_norm": norm, "approx_kl": 0.0, "logprob_gap_mean": 0.0, "updates": 1.0, **changes}


def test_the_rule():
    """Each with the median by hand of the four before it; two of them are enough."""
    rule, told = Spikes(), []
    #       none yet  [2]  [2 4] 3  [2 4 9] 4  [2 4 9 13] 6.5  [4 9 13 19] 11  [9 13 19 34] 16
    for norm in (2.0, 4.0, 9.0, 13.0, 19.0, 34.0, 48.5):
        metrics = figures(norm)
        told += rule.watch(metrics, CONFIG)
        assert metrics["spikes"] == (norm in (13.0, 34.0, 48.5))
        assert rule.in_a_row == {34.0: 1, 48.5: 2}.get(norm, int(norm == 13.0))
    assert told[0] == "spike: grad_norm = 13 is 3.2 times the median of the last 3 steps, 4 (train.spike_factor = 3)"
    with pytest.raises(
        UserError, match=r"2 steps in a row \(train.max_spike_steps = 2\) had a spike of .*: it is saved"
    ):
        rule.check(CONFIG, "it is saved")
    rule.check(replace(CONFIG, max_spike_steps=3), "")
    rule.check(replace(CONFIG, spike_factor=0.0), "")


def test_by_absolute_value_and_only_where_there_is_more_than_rounding():
    rule = Spikes()
    for loss, kl in ((-0.01, 1e-6), (0.01, 1e-6), (-0.011, 9e-5)):  # 90 times the median KL, and still nothing
        assert rule.watch(figures(1.0, loss=loss, approx_kl=kl), CONFIG) == []
    metrics = figures(1.0, loss=-0.5, approx_kl=2e-4)
    assert [text.split()[1] for text in rule.watch(metrics, CONFIG)] == ["loss", "approx_kl"]
    assert metrics["spikes"] == 2


def test_steps_without_an_update_and_what_is_not_finite_are_left_out():
    rule = Spikes()
    for norm in (1.0, 1.0, NAN, 1.0):
        rule.watch(figures(norm), CONFIG)
    rule.watch(figures(0.0, updates=0.0), CONFIG)
    assert rule.last["grad_norm"] == [1.0, 1.0, 1.0]
    assert rule.watch(metrics := figures(50.0), replace(CONFIG, spike_factor=0.0)) == []
    assert "spikes" not in metrics


def test_a_run_ends_saved_and_goes_on_with_what_it_remembers(processes, tmp_path):
    """Gradients of the third and fourth step are 10,000 times what they are. One run goes through, one is stopped."""
    tiny.make_model(tmp_path / "model", "qwen2", True)

    def trainer_of(name, most):
        changes = {
            "run": {"seed": 3, "dir": str(tmp_path / name)},
            "train": {"steps": 6, "spike_window": 4, "max_spike_steps": most},
            "rollout": {"n": 8, "prompts": 2},
            "optim": {"lr": 1e-3},
            "theory": {"every": 0},
        }
        trainer = make_trainer(str(tmp_path / "model"), processes, configured(changes), fakes.Engine())
        trainer.held_out = []

        def hook(_module, _args, output):
            if output.requires_grad and trainer.state.step in (2, 3):
                output.register_hook(lambda gradient: gradient * 1e4)

        trainer.worker.actor.embedding.register_forward_hook(hook)
        return trainer

    whole = trainer_of("whole", 0)
    assert whole.run(None, _Silent(), lambda: False)

    # The second in a row ends it, with the state of that step.
    stopped = trainer_of("stopped", 2)
    with pytest.raises(UserError, match=r"2 steps in a row .* the state after 4 steps is saved"):
        stopped.run(None, _Silent(), lambda: False)
    found = checkpoint.find(tmp_path / "stopped" / "checkpoints")
    assert checkpoint.read_run(found)["step"] == 4
    assert checkpoint.read_run(found)["spikes"]["in_a_row"] == 2

    # Gone on with, it remembers the same, to the bit.
    again = trainer_of("stopped", 2)
    again.restore(found)
    assert again.run(None, _Silent(), lambda: False)
    assert json.dumps(asdict(again.state.spikes)) == json.dumps(asdict(whole.state.spikes))
    assert again.state.spikes.in_a_row == 0
    norms = whole.state.spikes.last["grad_norm"]
    assert len(norms) == 4
    assert min(norms[:2]) > 100 * max(norms[2:])
