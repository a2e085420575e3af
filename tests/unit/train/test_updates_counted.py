"""Only applied optimizer steps count for warm-up, staleness and the version of the weights."""

from __future__ import annotations

from dataclasses import replace

import fakes
import pytest
from dist.steps import configured, make_trainer

NAN = float("nan")
GAE = {"algo": {"advantage": "gae", "mini_batches": 2}}


class Pool(fakes.Pool):
    """Reward even sums, or every response if `all_right` is set."""

    all_right = False

    def judge(self, answer):
        return 1.0 if self.all_right else super().judge(answer)


def trainer_of(model, processes, changes, tmp_path=None):
    base = {
        "run": {"seed": 3, "dir": str(tmp_path)},
        "rollout": {"n": 8, "prompts": 3},
        "reward": {"cut_off_factor": 1.0},
        "optim": {"lr": 1e-3, "warmup_steps": 100},
        "critic": {"lr": 1e-3},
        "algo": {"mini_batches": 2},
        "theory": {"every": 0},
    }
    merged = {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}
    trainer = make_trainer(model[0], processes, configured(merged), fakes.Engine(), pool=Pool())
    trainer.held_out = []
    trainer.sync_weights()
    return trainer


def poison_gradients(stage, active):
    """Make the gradient of an update NaN if active()."""

    def hook(_module, _args, output):
        if output.requires_grad and active():
            output.register_hook(lambda gradient: gradient * NAN)

    stage.module.embedding.register_forward_hook(hook)


def versions(trainer):
    """Return the version of the weights by the state, the engine and Adam's counter."""
    optimizer = trainer.models.actor.optimizer.chained_optimizers[0].optimizer
    steps = {int(s["step"]) for s in optimizer.state.values()} or {0}
    assert len(steps) == 1
    return trainer.state.updates, trainer.runner.engine.engine.version, steps.pop()


@pytest.mark.parametrize("changes", [{}, {"algo": {"epochs": 3}}, GAE], ids=["actor", "epochs", "gae"])
def test_a_step_without_a_signal_counts_nothing_and_sends_no_weights(processes, model, changes):
    trainer = trainer_of(model, processes, changes)
    verbs = trainer.runner.engine.engine.verbs
    updates = 0
    for all_right in (True, False, True, True, False):
        trainer.runner.pool.all_right = all_right
        verbs.clear()
        values, _ = trainer.train_step()
        assert ("sleep" in verbs, "update_weights" in verbs) == (not all_right, not all_right)
        assert values["weight_sync_again"] == 0
        assert (values["updates"] == 0) == all_right
        updates += int(values["updates"])
        assert versions(trainer) == (updates, updates, updates)
        assert values["lr"] == (0 if all_right else pytest.approx(1e-3 * updates / 100))
        if trainer.models.critic:
            assert trainer.state.critic_updates == updates
            assert values["critic_lr"] == values["lr"]


def test_a_mini_batch_without_a_row_counts_nothing(processes, model):
    """One prompt of three has a signal: of three mini-batches, two have no row."""
    trainer = trainer_of(model, processes, {"algo": {"mini_batches": 3}})
    groups = {}

    class SignalForOnePrompt(fakes.Pool):
        def submit(self, request):
            groups.setdefault(request.prompt.id, len(groups))
            if groups[request.prompt.id] % 3:
                request = replace(request, answer="2")  # an even sum: all responses are right
            return super().submit(request)

    trainer.runner = replace(trainer.runner, pool=SignalForOnePrompt())
    for step in range(1, 4):
        values, _ = trainer.train_step()
        assert values["updates"] == 1
        assert versions(trainer) == (step, step, step)
        assert values["lr"] == pytest.approx(1e-3 * step / 100)


def test_an_update_that_is_not_applied_counts_nothing(processes, model):
    """Both mini-batches of the first step and the first one of the second step have a NaN gradient."""
    trainer = trainer_of(model, processes, {})
    train = trainer.models.actor.train
    calls = []

    def train_and_count(*arguments):
        calls.append(1)
        return train(*arguments)

    trainer.models.actor.train = train_and_count
    poison_gradients(trainer.models.actor, lambda: len(calls) <= 3)
    metrics = [trainer.train_step()[0] for _ in range(3)]
    assert [(row["updates"], row["updates_skipped"]) for row in metrics] == [(0, 2), (1, 1), (2, 0)]
    assert [row["lr"] for row in metrics] == pytest.approx([0, 1e-3 * 1 / 100, 1e-3 * 3 / 100])
    assert versions(trainer) == (3, 3, 3)


def test_an_update_of_the_critic_that_is_not_applied_counts_nothing(processes, model):
    trainer = trainer_of(model, processes, GAE)
    poison_gradients(trainer.models.critic, lambda: trainer.state.step == 0)
    metrics = [trainer.train_step()[0] for _ in range(2)]
    assert [(row["critic_updates"], row["critic_updates_skipped"]) for row in metrics] == [(0, 2), (2, 0)]
    assert [row["critic_lr"] for row in metrics] == pytest.approx([0, 1e-3 * 2 / 100])
    assert (trainer.state.critic_updates, trainer.state.updates) == (2, 4)


def test_actor_waits_for_the_critic(processes, model, tmp_path):
    """critic.warmup_steps = 2 does not count steps without an update of the critic, before and after a resume."""
    changes = {**GAE, "critic": {"lr": 1e-3, "warmup_steps": 2}}
    trainer = trainer_of(model, processes, changes, tmp_path)
    updates = []
    for step, all_right in enumerate((True, False, True, False, False)):
        if step == 3:
            trainer.save()
            trainer = trainer_of(model, processes, changes, tmp_path)
            trainer.restore(tmp_path / "checkpoints" / "step_00000003")
        trainer.runner.pool.all_right = all_right
        values, _ = trainer.train_step()
        updates.append((values["critic_updates"], values["updates"]))
    assert updates == [(0, 0), (2, 0), (0, 0), (2, 0), (2, 2)]


def test_evaluations_during_critic_warmup_do_not_end_the_run(processes, model, tmp_path):
    changes = {
        **GAE,
        "critic": {"lr": 1e-3, "warmup_steps": 3},
        "train": {"steps": 9, "patience": 2},
        "evaluate": {"every": 1, "samples": 2},
    }
    trainer = trainer_of(model, processes, changes, tmp_path)
    trainer.held_out = fakes.prompts(2, first=1000)
    trainer.state.early_stopping.best = 1.0  # no evaluation is better
    trainer.run(None, fakes.Notes(), lambda: False)
    # The first evaluation that counts is that of step 4.
    assert trainer.state.step == 5
