"""NaN and infinities in a step: rows are left out, updates are skipped, runs end; compared with a step by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import fakes
import pytest
import tiny
import torch
from by_hand import assert_update, first_step
from dist.steps import configured, make_trainer
from unit.train.test_updates_counted import poison_gradients

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.errors import UserError
from megatron_brorl.train import trainer as trainer_module
from megatron_brorl.train.sft import sft
from megatron_brorl.train.trainer import count_nonfinite_steps

N = 32
TOKENS = 12
NAN = float("nan")
INF = float("inf")
ROWS = {("p/0", 3): NAN, ("p/1", 0): -INF, ("p/1", 31): INF, ("p/2", 17): NAN}  # last log-probs of the engine
PPO = {"algo": {"advantage": "gae"}, "critic": {"lr": 2e-3}}


def trainer_of(model, processes, changes, nonfinite=None):
    base = {"rollout": {"n": N, "prompts": 3}, "optim": {"weight_decay": 0.0, "lr": 1e-3}}
    engine = fakes.Engine(nonfinite=nonfinite or {})
    trainer = make_trainer(model[0], processes, configured({**base, **changes}), engine)
    trainer.held_out = []
    trainer.sync_weights()
    return trainer


def token_of_few(groups):
    """Return a token that no prompt has, and the rows in which the model reads it (a last token is only predicted)."""
    prompt_tokens = {token for prompt, _, _ in groups for token in prompt.token_ids}
    for token in set(range(3, tiny.VOCAB)) - prompt_tokens:
        rows = {(p.id, i) for p, siblings, _ in groups for i, row in enumerate(siblings) if token in row[:-1]}
        if 3 <= len(rows) <= 6 and len({name for name, _ in rows}) > 1:
            return token, rows
    raise AssertionError("no such token")


def poison(module, token):
    """Make the embedding of `token` NaN in every forward pass; the weights stay finite."""

    def hook(_module, _args, kwargs, output):
        return output.masked_fill(kwargs["input_ids"].T.eq(token)[..., None], NAN)

    module.embedding.register_forward_hook(hook, with_kwargs=True)


def assert_step_without(values, trainer, model, left_out):
    """Compare the metrics with a step by hand: baselines with all rows, loss and divisor without left_out."""
    groups = first_step(trainer.config.run.seed, 3, N, TOKENS)
    assert_update(values, model[1], groups, trainer.config.algo.is_cap, left_out)
    assert (values["nonfinite_rows"], values["updates"], values["updates_skipped"]) == (len(left_out), 1, 0)
    rewards = [r for _, _, group_rewards in groups for r in group_rewards]
    assert values["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert values["lost_share"] == 0
    assert all(math.isfinite(values[key]) for key in ("entropy", "approx_kl", "ratio_max", "logprob_gap_max"))


@pytest.mark.parametrize("ops", ["fused", "reference"])
def test_rows_with_nonfinite_engine_log_probs_are_left_out(processes, model, capfd, ops):
    trainer = trainer_of(model, processes, {"ops": {"implementation": ops}}, ROWS)
    values, _ = trainer.train_step()
    assert "not finite: p/0/3, p/1/0, p/1/31, p/2/17\n" in capfd.readouterr().err
    assert_step_without(values, trainer, model, set(ROWS))
    assert values["finite_rows"] == 3 * N - len(ROWS)


@pytest.mark.parametrize("share", [True, False])
def test_an_update_with_nan_activations_is_skipped(processes, model, capfd, share):
    """With one update per step, no earlier forward pass shows the NaN."""
    trainer = trainer_of(model, processes, {})
    object.__setattr__(trainer.models.actor.options, "share_prompt", share)
    token, _ = token_of_few(first_step(trainer.config.run.seed, 3, N, TOKENS))
    poison(trainer.models.actor.actor, token)
    before = {name: tensor.clone() for name, tensor in trainer.models.actor.hf_tensors()}
    values, _ = trainer.train_step()
    assert (values["updates"], values["updates_skipped"], values["finite_rows"]) == (0, 1, 3 * N)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.models.actor.hf_tensors())
    warning = capfd.readouterr().err
    assert "its gradient is not finite; its rows are: p/0/0, p/0/1, " in warning
    assert f" and {3 * N - 16} more\n" in warning  # after the names of 16 rows


def value_loss(left_out):
    """Return the value loss at values of 0, where a token's return is its response's reward."""
    rows = [
        (len(row), reward)
        for prompt, siblings, rewards in first_step(3, 3, N, TOKENS)
        for i, (row, reward) in enumerate(zip(siblings, rewards, strict=True))
        if (prompt.id, i) not in left_out
    ]
    return sum(tokens * reward**2 / 2 for tokens, reward in rows) / sum(tokens for tokens, _ in rows)


@pytest.mark.parametrize("changes", [{"algo": {"mini_batches": 2, "epochs": 2}}, PPO], ids=["two epochs", "gae"])
def test_rows_whose_old_log_probs_or_values_are_nan(processes, model, changes):
    """A row with NaN in one pass is left out of all, as if its engine log-probs were NaN."""
    critic = "critic" in changes
    trainer = trainer_of(model, processes, changes)
    token, left_out = token_of_few(first_step(trainer.config.run.seed, 3, N, TOKENS))
    poison(trainer.models.critic.critic if critic else trainer.models.actor.actor, token)
    reference = trainer_of(model, processes, changes, dict.fromkeys(left_out, NAN))
    values, _ = trainer.train_step()
    expected, _ = reference.train_step()
    for key in ("nonfinite_rows", "finite_rows", "updates", "trained_tokens", "loss", "grad_norm", "reward"):
        assert values[key] == expected[key], key
    assert (values["nonfinite_rows"], values["updates_skipped"]) == (len(left_out), 0)
    weights = dict(reference.models.actor.hf_tensors())
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.models.actor.hf_tensors())
    if critic:
        expected_loss = value_loss(left_out)
        assert values["value_loss"] == pytest.approx(expected_loss, rel=1e-6)
        assert values["return_mean"] == pytest.approx(2 * expected_loss, rel=1e-6)
        assert (values["critic_updates"], values["critic_updates_skipped"]) == (1, 0)


@pytest.mark.parametrize("nonfinite", ["rows", "gradients"])
def test_run_ends_after_consecutive_nonfinite_steps(processes, model, tmp_path, monkeypatch, nonfinite):
    """Steps 1, 2, 4, 5 and 6 are not finite. The run ends after three in a row, and the sixth step is saved."""
    changes = {"run": {"seed": 3, "dir": str(tmp_path)}, "train": {"steps": 20}, "theory": {"every": 0}}
    monkeypatch.setattr(trainer_module, "MAX_NONFINITE_STEPS", 3)
    trainer = trainer_of(model, processes, changes)
    if nonfinite == "rows":
        rows = {(f"p/{i}", s): NAN for i in range(60) for s in range(N) if i // 3 != 2}  # 3 prompts per step
        trainer.runner.engine.engine.nonfinite = rows
    else:
        poison_gradients(trainer.models.actor, lambda: trainer.state.step != 2)
    with pytest.raises(UserError) as caught:
        trainer.run(None, fakes.Notes(), lambda: False)
    message = str(caught.value)
    assert message.startswith("3 steps in a row skipped an update")
    assert "the state after 6 steps is saved" in message
    assert "\n" not in message
    saved = checkpoint.find(tmp_path / "checkpoints")
    assert saved is not None
    assert checkpoint.read_run(saved)["step"] == 6


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"updates_skipped": 0.0, "nonfinite_rows": 0.0, "finite_rows": 0.0}, 0),  # no group was kept
        ({"updates_skipped": 0.0, "nonfinite_rows": 5.0, "finite_rows": 5.0}, 0),
        ({"updates_skipped": 0.0, "nonfinite_rows": 6.0, "finite_rows": 5.0}, 3),
        ({"updates_skipped": 1.0, "nonfinite_rows": 0.0, "finite_rows": 5.0}, 3),
        ({"updates_skipped": 0.0, "critic_updates_skipped": 1.0, "nonfinite_rows": 0.0, "finite_rows": 5.0}, 3),
    ],
)
def test_steps_that_count_as_nonfinite(figures, expected):
    assert count_nonfinite_steps(before=2, metrics=figures) == expected


def break_a_weight(trainer):
    """Make a weight infinite in an optimizer step whose gradient is finite; return the weight's name."""
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    train = trainer.models.actor.train

    def train_and_break(*arguments):
        result = train(*arguments)
        with torch.no_grad():
            trainer.models.actor.actor.get_parameter(name)[1, 2] = INF
        return result

    trainer.models.actor.train = train_and_break
    return name


class SftData:
    """A source and a tokenizer: prompts whose answer is 7, with the tokens 7 and 11."""

    eos_id = 2

    def prompts(self, start, count):
        return [replace(p, answer="7") for p in fakes.prompts(count, start)]

    def encode(self, text):
        return [int(text), 11]


@pytest.mark.parametrize(
    ("lr", "message"),
    [(1e30, "step 2: loss nan, gradient norm nan"), (0.0, "step 1: weights that are not finite: decoder.layers.2.mlp")],
)
def test_sft_stops_if_not_finite(processes, model, lr, message):
    trainer = trainer_of(model, processes, {})
    config = SftConfig(steps=5, examples_per_step=4)
    if not lr:
        break_a_weight(trainer)
    with pytest.raises(UserError) as caught:
        sft(trainer.models.actor, SftData(), SftData(), config, OptimConfig(lr), None, fakes.Notes())
    assert str(caught.value).startswith(f"sft {message}")
    assert "nothing is exported" in str(caught.value)


def test_nonfinite_weights_are_not_sent_to_engines(processes, model):
    trainer = trainer_of(model, processes, {})
    name = break_a_weight(trainer)
    engine = trainer.runner.engine.engine
    with pytest.raises(UserError, match=rf"^the state after 1 step, actor: weights that are not finite: {name}; "):
        trainer.train_step()
    assert engine.verbs.count("update_weights") == 1  # before the step
