"""Numbers that are not finite: rows are left out, updates are skipped, and too many such steps end the run.

A response with a NaN or infinite value, or log-probability of the engine, the actor, the reference or the teacher, does
not count in losses and their divisors. Its reward still counts in the baseline of its group and in whitening.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.grid import Grid

MAX_STEPS = 5  # steps in a row that skip an update, after which a run ends
_NAMED = 16  # rows that a message names


def finite_rows(columns: Sequence[Sequence[Tensor]], grid: Grid) -> list[bool]:
    """Return whether all values of each row are finite on all ranks of the replica. Collective of the replica.

    columns: [G] per row each; all ranks of a replica have the same rows.
    """
    if not columns[0]:
        return []
    row_of = torch.arange(len(columns[0])).repeat_interleave(torch.tensor([len(row) for row in columns[0]]))
    broken = torch.zeros(len(columns[0]), dtype=torch.int32)
    for column in columns:
        broken[row_of[~torch.cat(list(column)).isfinite().cpu()]] = 1
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


def count_nonfinite_steps(before: int, metrics: Mapping[str, float]) -> int:
    """Return how many steps in a row, the one with these metrics included, skipped an update or left out most rows."""
    skipped = metrics["updates_skipped"] + metrics.get("critic_updates_skipped", 0.0)
    return before + 1 if skipped or metrics["nonfinite_rows"] > metrics["finite_rows"] else 0


def raise_if_too_many_nonfinite(steps: int, state: str) -> None:
    """Raise UserError if `steps`, from count_nonfinite_steps, reaches MAX_STEPS.

    state: text on the saved state, for the message.
    """
    if steps >= MAX_STEPS:
        raise UserError(
            f"{steps} steps in a row skipped an update because its gradient was "
            "not finite, or left out most of their rollouts because log-probabilities were not finite (updates_skipped "
            f"and nonfinite_rows in metrics.jsonl): {state}; find out whether the engine or the trainer returns them, "
            "or start a new run from the saved weights (brorl convert to-hf) with a lower learning rate"
        )
