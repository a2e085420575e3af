"""Steps with NaN on one rank or in some rows, in any layout."""

from __future__ import annotations

from typing import Any

import fakes
import torch
from dist.jobs import grid_of
from dist.steps import configured, make_trainer

from megatron_brorl.errors import UserError

NAN = float("nan")


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
    trainer = make_trainer(directory, grid_of(**parallel), configured(changes), engine)

    def hook(_module: Any, _args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(kwargs["input_ids"].T.eq(token)[..., None], NAN)

    if trainer.grid.pp_rank == 0:
        trainer.models.actor.actor.embedding.register_forward_hook(hook, with_kwargs=True)
    trainer.sync_weights()
    metrics = [trainer.train_step()[0] for _ in range(2)]
    return metrics, {name: tensor.clone() for name, tensor in trainer.models.actor.hf_tensors()}


def refused(rank: int, directory: str, parallel: dict[str, Any], root: str) -> str:
    """Return the error of a step after which only the last rank has a NaN, in its last layer."""
    trainer = make_trainer(directory, grid_of(**parallel), configured({"run": {"dir": root}}), fakes.Engine())
    trainer.state.step = 1
    trainer.save()
    trainer.sync_weights()
    worker = trainer.models.actor
    train = worker.train

    def breaks_a_weight(*arguments: Any) -> Any:
        result = train(*arguments)
        if rank == torch.distributed.get_world_size() - 1:
            with torch.no_grad():
                worker.actor.decoder.layers[-1].mlp.linear_fc1.weight[-1, -1] = NAN
        return result

    worker.train = breaks_a_weight  # type: ignore[method-assign]
    try:
        trainer.train_step()
    except UserError as e:
        return str(e)
    return "no error"
