"""One command's objects on this rank: built from the configuration, closed in order at its end."""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from megatron_brorl import ranks
from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.model_card import Training, model_card
from megatron_brorl.cli import run_folder, template_date
from megatron_brorl.cli.fingerprint import Fingerprint, fingerprint
from megatron_brorl.cli.job_end import JobEnd
from megatron_brorl.cli.preflight import Machines, check_host, gpu_bytes, micro_batch_tokens, preflight, tokenizer_line
from megatron_brorl.cli.program import NOTHING, Program
from megatron_brorl.config.schema import Config, OptimConfig
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.source import Sources, load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import load_tokenizer, stop_ids
from megatron_brorl.errors import UserError
from megatron_brorl.metrics import MetricsWriter
from megatron_brorl.model_shape import read_shape
from megatron_brorl.models import fp8, memory
from megatron_brorl.models.gpt import ATTENTION_ALONE, DTYPES
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import collectives, device, grid, network
from megatron_brorl.record import files as record_files
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.preflight import CheckedVerifiers, check_verifiers
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.rollout.engine import RolloutEngine
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.watchdog import GRACE_S, Watchdog
from megatron_brorl.rollout.work_stealing import WorkStealing
from megatron_brorl.timeline import dump_stacks_after
from megatron_brorl.tracking.trackers import check_installed, open_trackers
from megatron_brorl.train.critic_worker import CriticWorker
from megatron_brorl.train.record import Recorder
from megatron_brorl.train.rollouts import Rollouts
from megatron_brorl.train.setup import context
from megatron_brorl.train.update import critic_optim
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Prompt

AnyStage = TypeVar("AnyStage", Worker, CriticWorker)
T = TypeVar("T")


class Session:
    """What every command needs: grid, shape, tokenizer, prompts; and an orderly end of all of them."""

    sources: Sources  # not there where benchmarks are evaluated
    benchmarks: dict[str, list[Prompt]]  # what `brorl evaluate` asks, by name
    report: str  # of data.source: what was read, and what is odd about it

    def __init__(self, config: Config, benchmarks: bool = False, program: Program = NOTHING) -> None:
        """benchmarks: read the files of evaluate.benchmarks, where there are any, and nothing to train on."""
        self.base = config.model.path  # as the user names it
        self.program = program  # empty, where the command line runs the command
        model = str(model_directory(config.model.path))  # of the hub's cache, for a name of the hub
        self.config = config = replace(config, model=replace(config.model, path=model))
        self.dir = Path(config.run.dir).absolute()

        # The model's shape and its tokenizer, without its weights. A run that starts anew takes today's date.
        self.shape = read_shape(config.model.path)
        today = None if config.train.resume == "never" and not benchmarks else template_date.stored(self.dir)
        self.tokenizer = load_tokenizer(Path(config.model.path), today)
        # Without data.chat no prompt goes through the template.
        self.template_date = self.tokenizer.template_date if config.data.chat else None
        if self.tokenizer.vocab_size > self.shape.vocab:
            raise UserError(
                f"{config.model.path}: the tokenizer has {self.tokenizer.vocab_size} tokens, config.json's vocab_size "
                f"is {self.shape.vocab}: tokenizer and model do not belong together"
            )
        self.stop_ids = stop_ids(Path(config.model.path), self.tokenizer)  # any of them ends a response
        program.told("tokenizer", tokenizer_line(self.tokenizer, self.stop_ids, config.data.chat_template_kwargs))

        # What this machine must have; told before data is read, which may take long.
        check_installed(() if benchmarks else config.run.log)  # an evaluation has no steps to show
        self.ops = backend(config.ops.implementation, device.default_device(), config.fp8.head)
        fp8.check(config.fp8, self.shape, config.parallel.tensor)  # and what FP8 asks of device and shape

        # Prompts that leave room for a response.
        limit = context(config, self.shape) - config.rollout.max_tokens
        if benchmarks and config.evaluate.benchmarks:
            files = config.evaluate.benchmarks
            self.benchmarks, self.report = load_benchmarks(files, config.data, self.tokenizer, limit, config.reward)
            verifiers = {prompt.verifier for prompts in self.benchmarks.values() for prompt in prompts}
        else:
            self.sources = load_sources(config.data, self.tokenizer, limit, config.run.seed, config.reward)
            verifiers = set(self.sources.verifiers)
            self.benchmarks = {"held_out": self.sources.held_out} if self.sources.held_out else {}
            self.report = self.sources.report
        self._verifiers = verifiers  # names that occur
        program.told("data", self.report)

        # Join the other ranks last: a mistake above ends each of them at once.
        self.grid = grid.build(config.parallel, seed=config.run.seed, phase_s=config.rollout.timeout_s + GRACE_S)
        self.is_main_rank = self.grid.rank == 0  # it alone writes files and speaks
        program.told("ranks", self.grid.line())
        self.job_end, self.stopped_by = JobEnd(), ""
        self._kv_tokens = 0  # that an engine may have room for, found by `preflight`; 0 = as many as fit
        self._closing: list[Callable[[], Any]] = [grid.leave]  # called in reverse at an orderly end

    def __enter__(self) -> Session:
        self._lock()
        # Before the others' wait for a rank that hangs ends.
        dump_stacks_after(0.8 * self.config.parallel.timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        dump_stacks_after(0.0)
        if error is not None:
            self.grid.name_missing(error)
            if not self.program.goes_on:
                return  # and with it all that it holds
        for close in reversed(self._closing):
            close()

    def _lock(self) -> None:
        """Refuse a second run in the same directory, on every rank."""
        handle = self.together(lambda: run_folder.take(self.dir) if self.is_main_rank else None)
        if handle:
            self._closing.append(handle.close)
        self.together(lambda: template_date.keep(self.dir, self.template_date, self.is_main_rank))

    def together(self, look: Callable[[], T]) -> T:
        """What `look` finds on this rank. Raises the UserError of the first rank that has one on all of them."""
        found, refused = None, ""
        try:
            found = look()
        except UserError as e:
            refused = str(e)
        for text in filter(None, collectives.all_gather_text(refused)):
            raise UserError(text)
        return typing.cast(T, found)

    def preflight(self) -> None:
        """Plan the memory of both phases and the room on the disk, and print the plan. Raises UserError where something
        does not fit. A collective."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        machines = Machines(self.grid.world, per_node, gpu_bytes())
        plan, lines = preflight(self.config, self.shape, machines)
        self._kv_tokens = plan.kv_tokens(machines.gpu)
        self.together(lambda: check_host(plan, machines))
        room = self.together(lambda: run_folder.room_of(self.config, self.shape, self.dir))
        if self.is_main_rank:
            print("\n".join(lines), flush=True)
        self.program.told("disk", room)

    def worker(self, optim: OptimConfig | None, kind: type[Worker] = Worker) -> Worker:
        """The model with the weights of model.path, trainable where an optimizer is configured."""
        return self._filled(kind(self.shape, self.grid, self._stage_options(optim), optim))

    def critic(self) -> CriticWorker | None:
        """The critic, which begins as the model of model.path, where algo.advantage asks for one."""
        c = self.config
        if c.algo.advantage != "gae":
            return None
        optim = critic_optim(c.critic, c.optim)
        return self._filled(CriticWorker(self.shape, self.grid, self._stage_options(optim), optim))

    def _stage_options(self, optim: OptimConfig | None) -> StageOptions:
        """What a stage is built with. Raises UserError where one that trains will not fit in memory."""
        c = self.config
        if optim is not None and not c.fp8.parameters:
            memory.check(self.shape, self.grid, DTYPES[c.model.dtype], c.parallel.distributed_optimizer)
        return StageOptions(
            tokens_per_micro_batch=micro_batch_tokens(c, device.on_gpu()),
            dtype=DTYPES[c.model.dtype],
            ops=self.ops,
            share_prompt=c.train.share_prompt,
            recompute=c.train.recompute == "full",
            offload=c.train.offload,
            distributed_optimizer=c.parallel.distributed_optimizer,
            overlap=c.parallel.overlap,
            fields={**fp8.settings(c.fp8), **(ATTENTION_ALONE if c.train.recompute == "attention" else {})},
        )

    def _filled(self, stage: AnyStage) -> AnyStage:
        """The stage with the weights of model.path. Raises UserError where one is not finite."""
        path = self.config.model.path
        stage.load_hf(path)
        stage.require_finite(f"model.path = {path}", "give a model whose training did not diverge")
        return stage

    @functools.cached_property
    def started_verifiers(self) -> CheckedVerifiers:
        """What was found of the user's own verifiers. Raises UserError for one that cannot be used."""
        reward = self.program.reward
        started = check_verifiers(self._verifiers - ({custom.IN_PROCESS} if reward else set()), self.config.reward)
        if reward:
            started = replace(started, sha256={**started.sha256, custom.IN_PROCESS: custom.sha256(reward)})
        if started.unsandboxed and self.is_main_rank:
            print(f"warning: {probe.WARNING}", file=sys.stderr, flush=True)
        return started

    def fingerprint(self) -> Fingerprint:
        """What a run that is resumed must have in common with the one that it goes on from."""
        return fingerprint(self.config, self.shape, self.started_verifiers.sha256, self.inputs())

    def inputs(self) -> dict[str, str]:
        """See Sources.digests."""
        return self.sources.digests(Path(self.config.model.path), self.template_date)

    def rollouts(self) -> Rollouts:
        """The engine, watched, and the verifiers' processes; both end with the session."""
        c = self.config

        # The engine, behind a deadline; what it cannot begin at once is shared with those of other ranks.
        engine = self._torch_engine() if c.rollout.engine == "torch" else self._remote_engine()
        watchdog = Watchdog(engine, c.rollout.timeout_s, self.grid.rank)

        return Rollouts(
            engine=watchdog,
            pool=self.pool,
            tokenizer=self.tokenizer,
            reward=c.reward,
            seed=c.run.seed,
            grid=self.grid,
            max_lost_share=c.rollout.max_lost_share,
            work_stealing=WorkStealing(network.shared_store()) if c.rollout.pull else None,
        )

    @functools.cached_property
    def pool(self) -> RewardPool:
        """The verifiers' processes, which end with the session. A program's own function is called in this process."""
        c = self.config.reward
        impure = self.started_verifiers.impure
        pool = RewardPool(c.workers, c.timeout_s, impure=impure, function=self.program.reward)
        self._closing.append(pool.close)
        return pool

    def _torch_engine(self) -> RolloutEngine:
        c = self.config
        return TorchEngine(
            shape=self.shape,
            names=hf_shapes(self.shape),
            device=device.default_device(),
            dtype=DTYPES[c.rollout.dtype],
            max_rows=c.rollout.max_num_seqs,
            sample=self.ops.sample_tokens,
            ops=self.ops.decode,
            memory=c.rollout.kv_cache_mib * 2**20,
            decode=self.tokenizer.decode_all,
        )

    def _remote_engine(self) -> RolloutEngine:
        from megatron_brorl.rollout.remote.engine import join

        c = self.config
        engine = join(
            c,
            names=hf_shapes(self.shape),
            context=context(c, self.shape),
            vocab=self.shape.vocab,
            stop_ids=self.stop_ids,
            kv_tokens=self._kv_tokens,
            decode=self.tokenizer.decode_all,
        )
        self._closing.append(engine.close)
        return engine

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; older ones are moved aside where train.resume = "never"."""
        root = self.dir / "checkpoints"
        if self.config.train.resume == "auto":
            return checkpoint.find(root)

        # Nothing is deleted: what is there gets a number.
        if self.is_main_rank and root.exists():
            number = 1
            while (aside := root.with_name(f"checkpoints.{number}")).exists():
                number += 1
            root.rename(aside)

        dist.barrier()
        return None

    def writer(self, resume_step: int | None) -> MetricsWriter | None:
        """Where a step's figures go, on the main rank; resume_step: see metrics.Lines."""
        if not self.is_main_rank:
            return None
        trackers = open_trackers(self.config.run.log, self.dir, resume_step, asdict(self.config))
        writer = MetricsWriter(self.dir, trackers, resume_step)
        self._closing.append(writer.close)
        return writer

    def recorder(self, resume_step: int | None) -> Recorder:
        """What writes run.dir/rollouts, on every rank; resume_step: see record.files.begin."""
        folder = self.dir / record_files.FOLDER
        if self.is_main_rank:  # the others write nothing before they have sampled together
            record_files.begin(folder, resume_step)
        return Recorder(folder, self.config, self.tokenizer.decode, self.stop_ids, self.grid.rank)

    def stop_requested(self, save_s: float = 0.0) -> bool:
        """Whether to save and leave, asked between steps; all ranks get the same answer, and `stopped_by` says why.

        save_s: see JobEnd.step_fits.
        """
        own = {
            "signal": ranks.stop_requested(),
            "late": not self.job_end.step_fits(save_s),
            "told": self.program.callbacks.stop,
        }
        found = collectives.all_reduce_max({k: float(v) for k, v in own.items()})
        if found["signal"]:
            self.stopped_by = "stopped by a signal"
        elif found["told"]:
            self.stopped_by = "stopped by a callback"
        elif found["late"]:
            end = time.strftime("%H:%M:%S", time.localtime(self.job_end.at))
            self.stopped_by = f"the job ends at {end}, and a step takes up to {self.job_end.step_s():.0f} s"
        return any(found.values())

    def export(self, worker: Worker, card: Training) -> bool:
        """Write the weights as run.dir/model, a Hugging Face directory with its card. Raises UserError where one is not
        finite.

        Returns, on the main rank, whether they differ from those of model.path.
        """
        worker.require_finite("the trained model", f"{self.dir / 'model'} is not written; lower the learning rate")
        tensors, differs = worker.hf_tensors(), False
        if self.is_main_rank:
            dtype = str(worker.options.dtype).removeprefix("torch.")
            text, source = model_card(card), self.config.model.path
            differs = hugging_face.save(tensors, source, self.dir / "model", dtype, text)
        else:
            for _ in tensors:
                pass
        dist.barrier()
        return differs

    def peak_rss_mib(self) -> float:
        """Peak resident memory of all ranks, and what their scoring processes hold of their own, added up."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        # A forked process shares most of its pages with its parent; counting them again would be wrong.
        children = sum(p.memory_full_info().uss for p in psutil.Process().children(recursive=True)) / 2**20
        return collectives.all_reduce_sum({"mib": own + children})["mib"]
