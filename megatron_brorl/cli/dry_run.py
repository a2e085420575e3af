"""`brorl train --dry-run`: every check before a run, forward and backward pass included; nothing is written.

It uses the same objects as the run, prints a line per check, and ends with the first error.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.cli import preflight, run_folder
from megatron_brorl.cli.run_folder import change_line, check_fingerprint
from megatron_brorl.cli.session import Program, Session
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import cpu_bridge, grid
from megatron_brorl.train.state import saved
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import OptimizerStep, Worker
from megatron_brorl.types import Experience, Prompt

_ROLLOUTS, _TOKENS = 2, 8  # of the forward and backward pass


def dry_run(config: Config) -> int:
    """Make all checks; a collective of the ranks. Returns 0. Raises UserError."""
    preflight.check_machine()
    session = Session(config, program=Program(tell=_tell))  # tokenizer, data, layout
    _tell("run.dir", session.together(lambda: run_folder.look(session.dir) if session.is_main_rank else ""))
    session.preflight()  # memory and disk

    _tell("inputs", ", ".join(f"{name} {sha256[:12]}" for name, sha256 in session.inputs().items()))
    _tell("checkpoint", session.together(lambda: _checkpoint(session)))
    _tell("engine", session.together(lambda: preflight.engine_line(config.rollout.engine, config.engine.python)))
    _tell("reward", session.check_verifiers([*session.sources.first(), *session.sources.held_out]))

    worker = session.worker(config.optim, _Worker)
    found = _forward_backward(worker, session.sources.train.prompts(0, 1)[0], config)
    _tell("micro-step", f"loss {found['loss']:.3g}, gradient norm {found['grad_norm']:.3g}, nothing is changed")
    grid.leave()  # no rank waits for another
    _tell("dry run", "all is well; the same command without --dry-run starts the run")
    return 0


def _tell(name: str, value: str) -> None:
    """Print the result of a check, on one rank."""
    if value and os.environ.get("RANK", "0") == "0":
        print(f"  ok  {name:12} {value}".replace("\n", f"\n{'':19}"), flush=True)


def _checkpoint(session: Session) -> str:
    """Return the checkpoint that the run would continue from, in words. Raises UserError if it could not."""
    root = session.dir / "checkpoints"
    if session.config.train.resume == "never":
        return 'train.resume = "never": the run starts anew'
    found = checkpoint.find(root)
    if not found:
        return "none: the run starts anew"
    changes = change_line(check_fingerprint(saved(found)["fingerprint"], session.fingerprint(), found))
    return f"continues from {found}" + (f"\nchanged since that checkpoint: {changes}" if changes else "")


class _Worker(Worker):
    """A worker that computes the norm of its gradient and does not step."""

    def _step(self, lr: float) -> OptimizerStep:
        with cpu_bridge.bridge():
            self.optimizer.prepare_grads()
            return OptimizerStep(float(self.optimizer.get_grad_norm()), applied=True)


def _forward_backward(worker: Worker, prompt: Prompt, config: Config) -> dict[str, float]:
    """Return the metrics of an update on two short rollouts with opposite advantages; a collective.

    Raises UserError if loss or gradient is not finite.
    """
    # Any tokens serve as a response; those of the prompt are in the vocabulary.
    ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
    count = min(config.rollout.max_tokens, _TOKENS)
    responses = tuple(ids.repeat(count)[i : i + count] for i in range(_ROLLOUTS))
    prompts = (ids,) * _ROLLOUTS
    temperature = config.rollout.temperature
    log_probs: tuple[Tensor, ...] = tuple(worker.log_probs(prompts, responses, temperature))
    experience = Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=tuple(torch.full((count,), sign) for sign in (1.0, -1.0)),
        reference_log_probs=log_probs if config.algo.kl_coef else None,
    )
    mini_batches = [list(range(_ROLLOUTS))]
    found = update_policy(worker, experience, mini_batches, config.algo, config.optim, temperature, 0)
    if not math.isfinite(found["loss"]) or not math.isfinite(found["grad_norm"]):
        raise UserError(
            f"a forward and backward pass over {_ROLLOUTS} responses of {count} tokens: loss {found['loss']}, gradient "
            f"norm {found['grad_norm']}: not finite; check the weights of model.path, or train in fp32 (model.dtype)"
        )
    return found
