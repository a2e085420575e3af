"""The file of a skipped update: `brorl replay` comes to the bits of the run, and names what is not finite."""

from __future__ import annotations

import shutil

import fakes
import pytest
import tiny
import torch
from dist.steps import configured, make_trainer
from e2e.runs import brorl

from megatron_brorl.algo.loss import PolicyTokens, policy_loss
from megatron_brorl.algo.policy_losses import PolicyLossSettings
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import device
from megatron_brorl.train.examine import examine
from megatron_brorl.train.skipped import SkippedUpdate
from megatron_brorl.train.worker import Worker

NAN, INF = float("nan"), float("inf")
WEIGHT = "decoder.layers.1.mlp.linear_fc2.weight"


def trainer_of(processes, tmp_path, **train):
    if not (tmp_path / "model").exists():
        tiny.make_model(tmp_path / "model", "qwen2", True)
    changes = {
        "run": {"seed": 3, "dir": str(tmp_path / "run")},
        "rollout": {"n": 16, "prompts": 3},
        "optim": {"lr": 1e-3},
        "algo": {"mini_batches": 2},
        "theory": {"every": 0},
        "train": {"tokens_per_micro_batch": 120, "max_nonfinite_steps": 9, **train},
    }
    trainer = make_trainer(str(tmp_path / "model"), processes, configured(changes), fakes.Engine())
    trainer.held_out = []
    trainer.refit()
    return trainer


def kept(tmp_path):
    return sorted((tmp_path / "run" / "nonfinite").iterdir())


@pytest.fixture
def skipped(processes, tmp_path, capsys):
    """The file of a step in which an advantage of one row is infinite, after a step that moved the weights."""
    trainer = trainer_of(processes, tmp_path)
    trainer.train_step()
    real = trainer.worker.train

    def poisoned(prompts, responses, loss, temperature, lr):
        """The third row of the second mini-batch that is trained on."""
        calls.append(1)
        if len(calls) == 2:
            loss._part.advantages[2][0] = INF
        return real(prompts, responses, loss, temperature, lr)

    calls = []
    trainer.worker.train = poisoned
    values, _ = trainer.train_step()
    assert (values["updates"], values["updates_skipped"]) == (1, 1)
    (path,) = kept(tmp_path)
    said = f"step 1: an update was skipped; advantages of a response token is not finite: brorl replay {path}\n"
    assert said in capsys.readouterr().err
    return path, trainer


@pytest.mark.slow
def test_it_is_computed_again_to_the_same_bits(skipped, tmp_path):
    path, trainer = skipped
    # Both count from 0: two updates in the first step, and one before it in the second.
    assert path.name == "step_00000001_update_00000003.pt"
    found = SkippedUpdate.read(path)
    assert 2 in found.batch.rows
    assert not found.found.loss.isfinite()
    assert not found.found.gradient_norm.isfinite()

    # By the command, in a process of its own.
    done = brorl("replay", path)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("step 1, update 3, rank 0 of 1, torch ")
    assert first.endswith(": as in the run, bit for bit")
    assert lines[2] == "first not finite  advantages of a response token (in the run advantages of a response token)"
    broken = [line.split() for line in lines if line.endswith("from token 0")]
    assert [(line[0], line[5:]) for line in broken] == [("2", ["advantages", "from", "token", "0"])]
    assert len(lines) == 4 + len(found.batch.rows)

    # The last update of the step was the skipped one: a checkpoint of it has the same weights.
    trainer.save()
    of_checkpoint = brorl("replay", path, "--checkpoint", tmp_path / "run" / "checkpoints" / "step_00000002")
    assert of_checkpoint.returncode == 0, of_checkpoint.stderr
    assert of_checkpoint.stdout.splitlines()[1:] == lines


def test_its_rows_and_gradient_are_those_of_the_closed_form(skipped, processes):
    """With the advantage mended: the loss is algo.loss's of the log-probabilities, the rows add up to it, and the
    gradient is autograd's of the same micro-batch in a model that has no optimizer."""
    path, trainer = skipped
    found = SkippedUpdate.read(path)
    found.tokens.advantages[~found.tokens.advantages.isfinite()] = 0.5
    worker = trainer.worker
    worker.reload()
    worker.module.load_state_dict(found.weights)
    again = examine(worker, found.batch, found.tokens, found.settings, found.temperature)
    assert again.first == ""
    expected = policy_loss(again.log_probs.double(), again.entropy.double(), found.tokens, found.settings).loss
    torch.testing.assert_close(again.loss.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(again.log_probs, found.found.log_probs)  # which the advantage has no part in

    plain = Worker(worker.shape, processes, worker.options).actor
    plain.load_state_dict(found.weights)
    with device.bridge():
        hidden = plain.forward_packed(found.batch)
        log_probs, entropy = plain.head(hidden, found.batch, found.temperature).log_probs()
        loss = policy_loss(log_probs, entropy, found.tokens, found.settings).loss
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).double().norm()
    torch.testing.assert_close(again.gradient_norm.double(), norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        (lambda m: m.get_parameter(WEIGHT).data[1, 2].fill_(NAN), f"weight {WEIGHT}"),
        (lambda m: m.decoder.layers[1].mlp.register_forward_hook(lambda _m, _a, o: (o[0] * INF, *o[1:])), "output of "),
        (lambda m: m.embedding.register_forward_hook(_spoil_gradient), "gradient of embedding"),
    ],
    ids=["weight", "activation", "gradient"],
)
def test_the_first_tensor_that_is_not_finite_is_named(processes, tmp_path, spoil, first):
    trainer = trainer_of(processes, tmp_path)
    spoil(trainer.worker.actor)
    values, _ = trainer.train_step() if "gradient" in first else (None, None)
    if values:
        assert values["updates_skipped"] == 2
        assert len(kept(tmp_path)) == 1  # train.keep_nonfinite = 1
        assert SkippedUpdate.read(kept(tmp_path)[0]).found.first.startswith(first)
        return
    worker = trainer.worker
    (batch,) = worker.micro_batches([torch.tensor([3, 4])], [torch.tensor([5, 6])])
    tokens = PolicyTokens(torch.tensor([-1.0, -2.0]), torch.ones(2), torch.ones(2))
    found = examine(worker, batch, tokens, PolicyLossSettings(), 1.0)
    assert found.first.startswith(first)
    if "output" in first:
        assert found.first == "output of decoder.layers.1.mlp"


def test_what_is_no_such_file_is_told_in_one_line(skipped, tmp_path):
    path, _ = skipped
    whole = path.read_bytes()
    for data in (b"", b"no", whole[: len(whole) // 2], whole[:-2000]):
        (tmp_path / "bad.pt").write_bytes(data)
        with pytest.raises(UserError, match="no file of nonfinite/ of a run, or a damaged one") as caught:
            SkippedUpdate.read(tmp_path / "bad.pt")
        assert "\n" not in str(caught.value)
    torch.save({"weights": {}}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="damaged one: 'form'"):
        SkippedUpdate.read(tmp_path / "bad.pt")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        SkippedUpdate.read(tmp_path / "none.pt")


def test_nothing_is_kept_where_nothing_may_be(processes, tmp_path, capsys):
    trainer = trainer_of(processes, tmp_path, keep_nonfinite=0)
    trainer.worker.actor.embedding.register_forward_hook(_spoil_gradient)
    assert trainer.train_step()[0]["updates_skipped"] == 2
    assert not (tmp_path / "run" / "nonfinite").exists()

    # A disk that refuses it costs the file, not the run.
    trainer = trainer_of(processes, tmp_path, keep_nonfinite=1)
    trainer.worker.actor.embedding.register_forward_hook(_spoil_gradient)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "run").write_text("a file")
    capsys.readouterr()
    assert trainer.train_step()[0]["updates_skipped"] == 2
    assert "the micro-batch of this skipped update is not kept" in capsys.readouterr().err


def _spoil_gradient(_module, _args, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * NAN)
