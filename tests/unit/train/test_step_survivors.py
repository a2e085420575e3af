"""A step that loses rollouts trains on the others: loss and gradient, computed by hand over the survivors."""

from __future__ import annotations

import threading

import fakes
import numpy as np
import pytest
from by_hand import assert_update, first_step, update
from dist.steps import configured, make_trainer

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.errors import UserError
from megatron_brorl.tracking.progress import progress

N, TOKENS, LIMIT_S = 512, 12, 2.0
KILLED, STALLED = ("p/0", 17), ("p/1", 300)


@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stops", "hangs"])
def test_one_of_512_rollouts_lost_and_one_stalled(processes, model, deaf, capfd):
    """The step ends after the watchdog's limit, and its loss is the loss of the survivors, divided by their tokens."""
    release = threading.Event()
    engine = fakes.Engine(lose={KILLED}, stall={STALLED}, deaf=release if deaf else None)
    config = configured({"rollout": {"n": N, "prompts": 2, "timeout_s": LIMIT_S, "max_lost_share": 0.01}})
    trainer = make_trainer(model[0], processes, config, engine, grace_s=0.5)
    trainer.sync_weights()
    values, seconds = trainer.train_step()
    release.set()
    assert seconds["generate"] >= LIMIT_S
    survivors, everyone = (first_step(config.run.seed, 2, N, TOKENS, lost) for lost in ({KILLED, STALLED}, ()))
    assert_update(values, model[1], survivors, config.algo.is_cap)
    loss_of_all, _, _ = update(model[1], everyone, config.algo.is_cap)
    assert abs(values["loss"] - loss_of_all) > 1e-4 * abs(loss_of_all)  # The two lost rollouts matter.
    assert values["rollouts"] == 2 * N - 2
    assert values["lost_share"] == 2 / (2 * N)
    assert values["slow_rollouts"] == 2
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == (3 if deaf else 2)
    assert all("1 of prompt p/0" in line and "1 of prompt p/1" in line for line in warnings[:2])
    assert trainer.runner.stuck() == deaf
    # An engine that hangs gets no more calls, but its rank joins the barriers of its other ranks for sleep and wake.
    after = ["barrier", "barrier"] if deaf else ["sleep", "wake", "update_weights"]
    assert engine.verbs == ["wake", "update_weights", "generate", *after]


def test_too_many_lost_rollouts_end_the_run(processes, model):
    lose = {("p/1", i) for i in range(5)}
    config = configured({"rollout": {"n": 32, "prompts": 2, "max_lost_share": 4 / 64}})
    trainer = make_trainer(model[0], processes, config, fakes.Engine(lose=lose))
    trainer.sync_weights()
    message = r"step 1: 5 of 64 rollouts were lost, more than rollout\.max_lost_share = 0\.0625"
    with pytest.raises(UserError, match=message):
        trainer.train_step()


@pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated:FutureWarning")  # inside Megatron
def test_stuck_engine_ends_the_run_after_saving(processes, model, tmp_path):
    """The step is trained and saved. A new process continues as if the rollout had been lost."""
    release = threading.Event()
    config = configured({"rollout": {"timeout_s": 0.5}, "run": {"dir": str(tmp_path)}, "train": {"steps": 3}})
    hanging = fakes.Engine(stall={("p/5", 3)}, deaf=release)  # a prompt of the second step
    trainer = make_trainer(model[0], processes, config, hanging, grace_s=0.2)
    trainer.held_out = []
    with (
        progress(3, "train", enabled=False) as display,
        pytest.raises(UserError, match=r"did not stop when told to .* the state after 2 steps is saved: run the same"),
    ):
        trainer.run(None, display, lambda: False)
    release.set()
    saved = checkpoint.find(tmp_path / "checkpoints")
    assert saved.name == "step_00000002"
    resumed = make_trainer(model[0], processes, config, fakes.Engine())
    resumed.restore(saved)
    resumed.sync_weights()
    third, _ = resumed.train_step()
    undisturbed = make_trainer(model[0], processes, config, fakes.Engine(lose={("p/5", 3)}))
    undisturbed.sync_weights()
    expected = [undisturbed.train_step()[0] for _ in range(3)]
    assert expected[1]["lost_share"] == 1 / 128
    for metrics in (third, expected[2]):
        metrics.pop("slow_rollouts")  # The number of slow answers depends on the machine.
    np.testing.assert_equal(third, expected[2])  # bit for bit; unknown metrics are nan in both
