"""The micro-batch of an update that was skipped, with all that it takes to compute it again: run.dir/nonfinite/*.pt.

A file is what torch.save makes of plain values and tensors, and loads with weights_only=True. It holds the weights: the
optimizer steps before it in its step are in no checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.loss import PolicyTokens
from megatron_brorl.algo.policy_losses import PolicyLossSettings
from megatron_brorl.config.load import load_table
from megatron_brorl.config.schema import Config, ParallelConfig
from megatron_brorl.errors import UserError, shown
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models.gpt import ATTENTION_ALONE, DTYPES
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import collectives, device
from megatron_brorl.parallel.batch import Group, Packed
from megatron_brorl.parallel.grid import build
from megatron_brorl.timeline import each_beats
from megatron_brorl.train.actor_update import ActorLoss
from megatron_brorl.train.examine import Examined, examine
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience

FOLDER = "nonfinite"  # in run.dir
_FORM = "megatron_brorl skipped update 1"
_PARTS = {"shape": ModelShape, "tokens": PolicyTokens, "settings": PolicyLossSettings, "found": Examined}
# Whatever the bytes of another file lead to.
_DAMAGED = (
    *(RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(EOFError, pickle.UnpicklingError),
)
_NEEDED = 'parallel.tensor = parallel.pipeline = parallel.context = 1 and fp8.recipe = "none"'


@dataclass(frozen=True)
class SkippedUpdate:
    """A file of FOLDER."""

    step: int  # the number in metrics.jsonl
    update: int  # optimizer steps taken before this training step, plus the mini-batches before this one in it
    rank: int
    world: int  # of one copy of the model each
    torch: str  # its version
    threads: int  # of the CPU, on which the order of a sum depends
    config: Config
    shape: ModelShape
    batch: Packed
    tokens: PolicyTokens
    settings: PolicyLossSettings
    temperature: float
    found: Examined  # in the run
    weights: dict[str, Tensor]  # by the module's names

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Raises OSError."""
        named = ("step", "update", "rank", "world", "torch", "threads", "temperature", "weights")
        made = {"form": _FORM, **{name: getattr(self, name) for name in named}}
        made |= {name: asdict(getattr(self, name)) for name in ("batch", *_PARTS)}
        made["config"] = json.dumps(asdict(self.config))

        # Beside its place, to which it goes complete.
        aside = path.with_name(f".{path.name}.writing")
        try:
            with aside.open("wb") as file:
                torch.save(made, file)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
        except RuntimeError as e:  # torch's zip writer says so of a full disk
            raise OSError(0, str(e).partition("\n")[0]) from None
        finally:
            aside.unlink(missing_ok=True)

    @staticmethod
    def read(path: Path) -> SkippedUpdate:
        """Raises UserError where the file cannot be read or is none."""
        try:
            return SkippedUpdate._of(torch.load(path, map_location="cpu", weights_only=True), str(path))
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
        except _DAMAGED as e:
            raise UserError(f"{path}: no file of {FOLDER}/ of a run, or a damaged one: {shown(e)}") from None

    @staticmethod
    def _of(made: dict[str, Any], where: str) -> SkippedUpdate:
        """What was taken apart for the file, put together."""
        if made["form"] != _FORM:
            raise ValueError(f"another form: {shown(made['form'])}")
        batch = made["batch"]
        groups = tuple(Group(g["prefix"], tuple(map(tuple, g["segments"]))) for g in batch["groups"])
        made["batch"] = Packed(**{**batch, "groups": groups, "rows": tuple(batch["rows"])})
        made["config"] = load_table(json.loads(made["config"]), where)
        for name, kind in _PARTS.items():
            made[name] = kind(**made[name])
        return SkippedUpdate(**{f.name: made[f.name] for f in fields(SkippedUpdate)})


def worker_of(kept: SkippedUpdate) -> Worker:
    """The model of a file in a process of its own, which joins a grid of one, with the weights that it holds."""
    torch.set_num_threads(kept.threads)
    c = kept.config
    options = StageOptions(
        tokens_per_micro_batch=1,  # nothing is packed
        dtype=DTYPES[c.model.dtype],
        ops=backend(c.ops.implementation, device.default_device(), c.fp8.head),
        recompute=c.train.recompute,
        fields=ATTENTION_ALONE if c.train.recompute_attention else {},
    )
    worker = Worker(kept.shape, build(ParallelConfig()), options, c.optim)
    worker.module.load_state_dict(kept.weights, strict=False)
    return worker


def tokens_on(kept: SkippedUpdate, worker: Worker) -> PolicyTokens:
    """Those of a file [R] on the device of this process."""
    where = next(worker.module.parameters()).device
    return _moved(kept.tokens, where)


def _moved(tokens: PolicyTokens, where: torch.device) -> PolicyTokens:
    """The same [R] on another device."""
    moved: dict[str, Any] = {k: v if v is None else v.to(where) for k, v in vars(tokens).items()}
    return PolicyTokens(**moved)


@dataclass(frozen=True)
class Keeper:
    """Keeps the micro-batches of one step's skipped updates."""

    config: Config
    step: int  # the number in metrics.jsonl

    def keep(self, update: int, worker: Worker, part: Experience, loss: ActorLoss, temperature: float) -> None:
        """Write the first micro-batch that is not finite by itself, as train.keep_nonfinite allows; a collective.

        part: this rank's rows of a mini-batch whose gradient was not finite. A disk that refuses it is told of.
        """
        # Counted by one rank for all: what follows is a collective.
        grid, most, folder = worker.grid, self.config.train.keep_nonfinite, Path(self.config.run.dir) / FOLDER
        full = len(list(folder.glob("*.pt"))) >= most
        if collectives.all_reduce_max({"full": float(grid.rank == 0 and full)})["full"]:
            return

        # A part of a model computes nothing by itself.
        if grid.mp_size > 1 or self.config.fp8.recipe != "none":
            if grid.rank == 0:
                _say(f"step {self.step}: an update was skipped; to have it kept for brorl replay go on with {_NEEDED}")
            return

        # The first rank that has one writes it.
        found = self._look(worker, part, loss, temperature)
        # Others may have one too: a file for each would be a copy of the weights for each.
        flags = collectives.all_gather([float(found is not None)], None)
        if found is None or [1.0] in flags[: grid.rank]:
            return

        # Whole on the disk before it is spoken of.
        kept = self._kept(update, worker, loss.settings, temperature, *found)
        path = folder / f"step_{self.step:08d}_update_{update:08d}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept.save(path)
        except OSError as e:
            # The run is worth more than what would explain it.
            _say(f"warning: {path}: {e.strerror or e}; the micro-batch of this skipped update is not kept")
            return
        _say(f"step {self.step}: an update was skipped; {kept.found.first} is not finite: brorl replay {path}")

    def _kept(
        self,
        update: int,
        worker: Worker,
        settings: PolicyLossSettings,
        temperature: float,
        batch: Packed,
        tokens: PolicyTokens,
        found: Examined,
    ) -> SkippedUpdate:
        """All of it in host memory."""
        return SkippedUpdate(
            step=self.step,
            update=update,
            rank=worker.grid.rank,
            world=worker.grid.world,
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            config=self.config,
            shape=worker.shape,
            batch=batch,
            tokens=_moved(tokens, torch.device("cpu")),
            settings=settings,
            temperature=temperature,
            found=found,
            weights={k: v.cpu() for k, v in worker.module.state_dict().items() if isinstance(v, Tensor)},
        )

    def _look(
        self, worker: Worker, part: Experience, loss: ActorLoss, temperature: float
    ) -> tuple[Packed, PolicyTokens, Examined] | None:
        batches: Sequence[Packed] = worker.micro_batches(part.prompts, part.responses)
        for batch in each_beats(batches):
            tokens = loss.tokens(batch, device.default_device(), worker.options.dtype)
            examined = examine(worker, batch, tokens, loss.settings, temperature)
            if examined.first:
                return batch, tokens, examined
        return None


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # nobody reads the pipe any more
        return
