"""`brorl train --dry-run`: whatever a run needs, looked at in the run's own order; nothing is written.

What a run would check itself is checked by the same objects (cli/build.py). A line per thing that is well; the first
that is not ends it as any mistake does, in one line that says what to do.
"""

from __future__ import annotations

import os

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.cli import run_folder
from megatron_brorl.cli.build import Session
from megatron_brorl.cli.engine_check import engine_line, ports_line
from megatron_brorl.cli.fingerprint import change_line, check_fingerprint
from megatron_brorl.cli.program import Program
from megatron_brorl.cli.references import check
from megatron_brorl.config.schema import Config
from megatron_brorl.parallel import grid
from megatron_brorl.train.micro_step import StillWorker, micro_step
from megatron_brorl.train.state import saved


def dry_run(config: Config) -> int:
    """Look at all of it; a collective of the ranks that it is started as. Returns 0. Raises UserError."""
    # Tokenizer, data, ranks and layout: told by the session as it is made.
    session = Session(config, program=Program(told=_tell))
    _tell("run.dir", session.together(lambda: run_folder.look(session.dir) if session.is_main_rank else ""))
    session.preflight()  # memory and disk

    # What it would go on from, and what it is fed.
    _tell("inputs", ", ".join(f"{name} {sha256[:12]}" for name, sha256 in session.inputs().items()))
    _tell("checkpoint", session.together(lambda: _checkpoint(session)))

    # Who samples, and who judges.
    _tell("engine", session.together(lambda: engine_line(config)))
    _tell("ports", session.together(lambda: ports_line(config) if session.is_main_rank else ""))
    # The same check ends a run before it begins.
    _tell("reward", check(session, [*session.sources.first(), *session.sources.held_out]))

    # The model, forward and backward.
    worker = session.worker(config.optim, StillWorker)
    assert isinstance(worker, StillWorker)
    prompt, rollout = session.sources.train.take(0, 1)[0], config.rollout
    found = micro_step(worker, prompt, rollout.max_tokens, config.algo, config.optim, rollout.temperature)
    _tell("micro-step", f"loss {found['loss']:.3g}, gradient norm {found['grad_norm']:.3g}, nothing is changed")
    # Groups are left, so that no rank waits for another.
    grid.leave()
    _tell("dry run", "all is well; the same command without --dry-run begins the run")
    return 0


def _tell(name: str, value: str) -> None:
    """Print a line of what is well, on one rank."""
    if value and os.environ.get("RANK", "0") == "0":
        print(f"  ok  {name:12} {value}".replace("\n", f"\n{'':19}"), flush=True)


def _checkpoint(session: Session) -> str:
    """The checkpoint that the run would go on from, in words. Raises UserError where it could not."""
    root = session.dir / "checkpoints"
    if session.config.train.resume == "never":
        return 'train.resume = "never": the run starts anew'
    found = checkpoint.find(root)
    if not found:
        return "none: the run starts anew"
    run = saved(found)
    changes = change_line(check_fingerprint(run["fingerprint"], session.fingerprint(), found))
    return f"goes on from {found}" + (f"\nchanged since that checkpoint: {changes}" if changes else "")
