"""`brorl replay`: the micro-batch of a skipped update computed again, row by row."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError

_DESCRIPTION = """\
Compute the micro-batch of a skipped update again: run.dir/nonfinite/step_K_update_N.pt, which a run writes where a loss
or a gradient is not finite (train.keep_nonfinite). Prints its loss and gradient norm, the first tensor that is not
finite, and its rows. By itself a file gives the bits of the run, on one process of the same kind of device with the
same torch; exit code 1 where it does not. With --checkpoint the weights are those of another moment."""


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    text = "the micro-batch of a skipped update, computed again: what of it is not finite, row by row"
    replay = commands.add_parser(
        "replay", help=text, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    replay.add_argument("file", metavar="FILE", type=Path, help="run.dir/nonfinite/*.pt")
    replay.add_argument(
        "--checkpoint", metavar="STEP_DIR", type=Path, help="run.dir/checkpoints/step_K whose weights to take instead"
    )
    replay.set_defaults(command=_replay)


def _replay(args: argparse.Namespace) -> int:
    # A launcher's ranks would all do the same.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"replay: {os.environ['WORLD_SIZE']} processes: a micro-batch is one process's; start one")
    from megatron_brorl.parallel import device

    # Before Megatron is imported.
    device.leave_out_compiler()
    from megatron_brorl.parallel import grid
    from megatron_brorl.train.skipped import SkippedUpdate

    # The grid of one process that the model is built in ends with the command.
    kept = SkippedUpdate.read(args.file)
    try:
        again = _again(kept, args.checkpoint)
    finally:
        grid.leave()

    # Whether it came to what it came to then.
    same = again.same_bits(kept.found)
    how = (
        f"weights of {args.checkpoint}"
        if args.checkpoint
        else "as in the run, bit for bit"
        if same
        else "NOT as in the run"
    )
    # At once: a reader that goes away has seen all or nothing.
    print("\n".join([_title(kept, how), *_figures(kept.found, again), *_rows(kept, again)]))
    return 0 if same or args.checkpoint else 1


def _again(kept: Any, directory: Path | None) -> Any:
    """What comes of it with the weights that it had then, or with those of a checkpoint."""
    from megatron_brorl.checkpoints import manifest
    from megatron_brorl.checkpoints import training as checkpoint
    from megatron_brorl.train.examine import examine
    from megatron_brorl.train.skipped import tokens_on, worker_of

    if directory and (problem := manifest.damage(directory)):
        raise UserError(f"{directory}: {problem}; give a folder of run.dir/checkpoints")
    worker = worker_of(kept)
    if directory:
        checkpoint.load(directory, [checkpoint.Part("", worker.actor, worker.optimizer)])
    return examine(worker, kept.batch, tokens_on(kept, worker), kept.settings, kept.temperature)


def _title(kept: Any, how: str) -> str:
    return f"step {kept.step}, update {kept.update}, rank {kept.rank} of {kept.world}, torch {kept.torch}: {how}"


def _figures(then: Any, now: Any) -> list[str]:
    """What came of the whole micro-batch."""
    return [
        f"loss              {float(now.loss):.9g} (in the run {float(then.loss):.9g})",
        f"gradient norm     {float(now.gradient_norm):.9g} (in the run {float(then.gradient_norm):.9g})",
        f"first not finite  {now.first or 'nothing: all of it is finite'} (in the run {then.first})",
    ]


def _rows(kept: Any, again: Any) -> list[str]:
    """A line for each row of the micro-batch: its share of the loss, and its columns that are not finite."""
    from megatron_brorl.algo.loss import policy_loss

    # Columns are checked by themselves: where several are not finite, the loss does not tell which.
    end = 0
    lines = [f"{'row':>6} {'tokens':>7} {'loss':>14} {'mean log-prob':>14} {'max |advantage|':>16}  not finite"]
    columns = {**{k: v for k, v in vars(kept.tokens).items() if v is not None}, "log_probs": again.log_probs}
    for row, count in zip(kept.batch.rows, kept.batch.counts.tolist(), strict=True):
        # A row's tokens stand side by side, in the order of the rows.
        part, end = slice(end, end + count), end + count
        of_row = kept.tokens.where(part)
        log_probs = again.log_probs[part]
        loss = policy_loss(log_probs, again.entropy[part], of_row, kept.settings).loss

        # The first token of each column that is not finite, counted from 0; masked ones have no part in the loss.
        live = of_row.weights != 0
        broken = {name: (~x[part].isfinite() & live).nonzero() for name, x in columns.items()}
        what = ", ".join(f"{name} from token {int(at[0])}" for name, at in broken.items() if len(at))
        lines.append(
            f"{row:>6} {count:>7} {float(loss):>14.6g} {float(log_probs.mean()):>14.6g} "
            f"{float(of_row.advantages.abs().max()):>16.6g}  {what or '-'}"
        )
    return lines
