"""Rows and gradients that are not finite: a row is left out, a gradient is not applied, and too much of it ends a run.

A response has no part in losses and their divisors where one of its log-probabilities (the engine's, the actor's, the
reference's) or values is NaN or infinite. Its verdict stands: baselines, and what is whitened over a step's rollouts,
count its reward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives, cpu_bridge
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.worker import Update

Score = Callable[[list[int]], Sequence[Tensor]]  # rows -> log-probabilities or values of each row's tokens, [G]
_NAMED = 16  # rows that a message names


def finite_rows(columns: Sequence[Sequence[Tensor]], grid: Grid) -> list[bool]:
    """Whether all values of each row are finite, the same on every rank of a replica, of which it is a collective.

    columns: of [G] per row each; a replica's ranks have the same rows.
    """
    lengths = torch.tensor([len(row) for row in columns[0]], dtype=torch.int64)
    row_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    broken = torch.zeros(len(lengths), dtype=torch.int32)
    for column in columns if len(lengths) else ():
        broken[row_of[~torch.cat(list(column)).isfinite()]] = 1
    if len(lengths):
        broken = broken.to(cpu_bridge.default_device())
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=grid.replica)
    return (broken == 0).tolist()


def log_rows(what: str, rows: Sequence[int], ids: Sequence[str], grid: Grid) -> None:
    """Print the ids of the first of these rows to stderr, once per replica."""
    if rows and dist.get_rank(grid.replica) == 0:
        named = ", ".join(ids[row] if ids else f"row {row}" for row in rows[:_NAMED])
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        with contextlib.suppress(OSError):  # A closed stderr does not end the run.
            print(f"rank {grid.rank}: {what}: {named}{more}", file=sys.stderr, flush=True)


def train_on_finite(
    rows: list[int],
    attempt: Callable[[list[int]], tuple[Update, dict[str, float]] | None],
    score: Score,
    grid: Grid,
    ids: Sequence[str],
) -> tuple[tuple[Update, dict[str, float]] | None, list[int]]:
    """One optimizer step on this replica's rows, and the rows that it had to leave out; a collective.

    attempt: the step, None where no replica has a token to train on. score: what the model makes of each row [G].
    ids: of all rows, for the message. Where the gradient of all rows is not finite, rows whose score is not are left
    out and the others tried again: a NaN in a row's activations would reach the weights' gradients whatever its part in
    the loss is.
    """
    done = attempt(rows)
    if done is None or done[0].applied:
        return done, []
    finite = finite_rows([score(rows)], grid)
    broken = [row for row, fine in zip(rows, finite, strict=True) if not fine]
    if not collectives.all_reduce_sum({"rows": float(len(broken))}, grid.groups.dp)["rows"]:
        log_rows("an update is skipped, its gradient is not finite; its rows are", rows, ids, grid)
        return done, []
    log_rows("left out of an update, the model's numbers are not finite", broken, ids, grid)
    return attempt([row for row, fine in zip(rows, finite, strict=True) if fine]) or done, broken


def nonfinite_steps(before: int, metrics: Mapping[str, float]) -> int:
    """Steps in a row, up to one of these metrics, that skipped an update or left out more rows than they kept."""
    skipped = metrics["updates_skipped"] + metrics.get("critic_updates_skipped", 0.0)
    return before + 1 if skipped or metrics["nonfinite_rows"] > metrics["finite_rows"] else 0


def check_steps(steps: int, most: int, state: str) -> None:
    """Raise UserError where as many steps in a row as config key train.max_nonfinite_steps were not finite."""
    if steps >= most:
        raise UserError(
            f"{steps} steps in a row (train.max_nonfinite_steps = {most}) skipped an update whose gradient was not "
            "finite, or left out more rollouts than they kept, whose log-probabilities were not (updates_skipped and "
            f"nonfinite_rows in metrics.jsonl): {state}; see whether engine or trainer gives them, or start anew from "
            "the saved weights (brorl convert to-hf) with a lower learning rate"
        )
