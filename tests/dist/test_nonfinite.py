"""All ranks take the same decision if rows, or one rank's weights, are not finite."""

from __future__ import annotations

from typing import Any

import fakes
import pytest
import torch
from dist.jobs import streamed
from dist.steps import UNEVEN, assert_same, take_steps, trainer_of

from megatron_brorl.errors import UserError

NAN = float("nan")
LAYOUTS = [(2, {"tensor": 2}), (4, {"pipeline": 2}), (4, {"context": 2})]
NAN_ROWS = [("p/0", 5), ("p/1", 15), ("p/1", 16), ("p/2", 31), ("p/4", 0)]
TOKEN = 40
# Before several updates a forward pass of the actor finds the NaN.
CHANGES = UNEVEN | {"algo": {"mini_batches": 2, "epochs": 2}, "theory": {"every": 0}}


def steps(
    _rank: int,
    directory: str,
    parallel: dict[str, Any],
    changes: dict[str, Any],
    token: int,
    rows: list[tuple[str, int]],
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Run two steps in which the embedding of `token` is NaN and the engine's log-probs of `rows` are NaN."""
    engine = fakes.Engine(nonfinite=dict.fromkeys(rows, NAN))
    trainer = trainer_of(directory, parallel, changes, engine)

    def hook(_module: Any, _args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(kwargs["input_ids"].T.eq(token)[..., None], NAN)

    if trainer.grid.pp_rank == 0:
        trainer.models.actor.actor.embedding.register_forward_hook(hook, with_kwargs=True)
    return take_steps(trainer, 2), streamed(trainer.models.actor)


@pytest.mark.slow
def test_all_layouts_leave_out_the_same_rows(worlds, directory):
    expected = worlds(1).run("test_nonfinite:steps", directory, {}, CHANGES, TOKEN, NAN_ROWS)[0]
    for metrics in expected[0]:
        assert metrics["nonfinite_rows"] > 4  # also rows with TOKEN
        assert (metrics["updates_skipped"], metrics["updates"]) == (0, 4)
    for size, parallel in LAYOUTS:
        assert_same(worlds(size).run("test_nonfinite:steps", directory, parallel, CHANGES, TOKEN, NAN_ROWS), expected)


def refused(rank: int, directory: str, parallel: dict[str, Any], root: str) -> str:
    """Return the error of a step after which only the last rank has a NaN, in its last layer."""
    trainer = trainer_of(directory, parallel, {"run": {"dir": root}})
    trainer.state.step = 1
    trainer.save()
    trainer.sync_weights()
    worker = trainer.models.actor
    train = worker.train

    def train_and_break_a_weight(*arguments: Any) -> Any:
        result = train(*arguments)
        if rank == torch.distributed.get_world_size() - 1:
            with torch.no_grad():
                worker.actor.decoder.layers[-1].mlp.linear_fc1.weight[-1, -1] = NAN
        return result

    worker.train = train_and_break_a_weight  # type: ignore[method-assign]
    try:
        trainer.train_step()
    except UserError as e:
        return str(e)
    return "no error"


@pytest.mark.parametrize(("size", "parallel"), [(2, {"tensor": 2}), (4, {"pipeline": 2})])
def test_nan_weights_on_one_rank_end_the_run_before_a_checkpoint(worlds, directory, tmp_path, size, parallel):
    """The error is one line, the same on every rank, with the layer's number in the whole model."""
    errors = set(worlds(size).run("test_nonfinite:refused", directory, parallel, str(tmp_path)))
    assert len(errors) == 1
    weight = "decoder.layers.3.mlp.linear_fc1.weight"
    assert errors.pop().startswith(
        f"the state after 2 steps, actor: weights that are not finite: {weight}; no checkpoint"
    )
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000001"
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("*step_*"))] == ["step_00000001"]
