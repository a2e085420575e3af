"""Build the objects of a command on this rank from the configuration, and close them in reverse order at its end."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import time
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from megatron_brorl import rollout_log, signals
from megatron_brorl.checkpoints import adapters, hugging_face
from megatron_brorl.checkpoints.model_card import InitialModel, TrainingFacts, model_card
from megatron_brorl.cli import memory_plan, run_folder, trial
from megatron_brorl.cli.agent import Agent
from megatron_brorl.cli.run_folder import Fingerprint
from megatron_brorl.cli.teacher import check_teacher, teacher_directory
from megatron_brorl.config.rules import check_model, replays_routes
from megatron_brorl.config.schema import Config, DataConfig, OptimConfig
from megatron_brorl.data.chat import Message
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.source import TEMPLATE_DATE, TRAIN_STREAM, Sources, load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import load_tokenizer, stop_ids
from megatron_brorl.environments.interface import Format, describe
from megatron_brorl.environments.pool import EnvironmentPool
from megatron_brorl.errors import UserError, warn
from megatron_brorl.families.shape import ModelShape, read_shape
from megatron_brorl.models import fp8
from megatron_brorl.models.gpt import DTYPES, RECOMPUTE_ATTENTION
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import collectives, cpu_bridge, grid, network
from megatron_brorl.parallel.network import StallReporter
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.preflight import CheckedVerifiers, check_references, check_verifiers, try_texts
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rewards.sandbox import run as sandbox
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.rollout.engine import RolloutEngine
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.sampler import WorkStealing
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.rollout.watchdog import GRACE_S, Watchdog
from megatron_brorl.tracking.metrics import MetricsWriter
from megatron_brorl.tracking.timeline import dump_stacks_after, span
from megatron_brorl.tracking.trackers import check_installed, open_trackers
from megatron_brorl.train.callbacks import Callbacks
from megatron_brorl.train.group_rewards import try_group_function
from megatron_brorl.train.models import CriticWorker
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.train.sample_and_score import RolloutRunner
from megatron_brorl.train.sampling_params import context
from megatron_brorl.train.update import critic_optim
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Prompt
from megatron_brorl.user_functions import is_function, source_sha256

AnyStage = TypeVar("AnyStage", Worker, CriticWorker)
T = TypeVar("T")


@dataclass(frozen=True)
class Program:
    """Functions and callbacks that a Python program adds to a command."""

    reward: custom.RewardFunction | None = None  # scores rows whose verifier is custom.IN_PROCESS
    algorithm: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by key, such as "algo.advantage"
    callbacks: Callbacks = field(default_factory=Callbacks)
    environment: type | None = None  # the class that environment.factory names
    agent: Callable[..., Any] | None = None  # the function that agent.function names
    accept_changed_functions: bool = False  # continue from a checkpoint of other versions of the user's functions
    continues: bool = False  # True if the program survives an error, so that the session must release its resources
    on_check: Callable[[str, str], None] = lambda name, value: None  # called with each check and its result


class Session:
    """The grid, model shape, tokenizer and prompts of a command, and the engine and workers that it starts."""

    sources: Sources  # not set if benchmarks are evaluated
    benchmarks: dict[str, list[Prompt]]  # prompts of `brorl evaluate`, by name
    report: str  # summary of the data that was loaded, for the user

    @span("reading the data")
    def __init__(
        self, config: Config, benchmarks: bool = False, program: Program | None = None, stream: int = TRAIN_STREAM
    ) -> None:
        """Read the model's configuration and the data, and join the other ranks. Raises UserError.

        benchmarks: read the files of evaluate.benchmarks, if there are any, instead of training data. stream: number
        of the random stream of generated training prompts.
        """
        self.base = config.model.path  # as the user wrote it
        self.program = program = program or Program()
        model = str(model_directory(config.model.path))  # the cached download if the path is a name on the hub
        self.config = config = replace(config, model=replace(config.model, path=model))
        self.dir = Path(config.run.dir).absolute()

        self.shape = read_shape(config.model.path)
        self.tokenizer = load_tokenizer(Path(config.model.path), run_folder.template_date(self.dir))
        self.template_date = self.tokenizer.template_date if config.data.chat else None
        if self.tokenizer.vocab_size > self.shape.vocab:
            raise UserError(
                f"{config.model.path}: the tokenizer has {self.tokenizer.vocab_size} tokens, config.json's vocab_size "
                f"is {self.shape.vocab}: tokenizer and model do not belong together"
            )
        self.stop_ids = stop_ids(Path(config.model.path), self.tokenizer)
        stops = ", ".join(map(str, self.stop_ids))
        program.on_check("tokenizer", f"{self.tokenizer.vocab_size} tokens, responses end at {stops}")

        # Check these before reading the data, which may take long.
        check_installed(() if benchmarks else config.run.log)
        self.ops = backend(config.ops.implementation, cpu_bridge.default_device())
        fp8.check(config.fp8, self.shape, config.parallel.tensor)
        check_model(config, self.shape.family, self.shape.experts, config.model.path)

        self._environment_class = program.environment or config.environment.factory
        self.environment = describe(self._environment_class) if config.environment.factory else None
        self.agent = Agent.of(config, program.agent, self.tokenizer)
        program.on_check("agent", str(self.agent or ""))
        self._data = data = self._data_config()
        self._tool_format = self._check_turns()

        # Drop prompts that leave no room for a response.
        limit = context(config, self.shape) - config.rollout.max_tokens
        if benchmarks and config.evaluate.benchmarks:
            files = config.evaluate.benchmarks
            self.benchmarks, self.report = load_benchmarks(files, data, self.tokenizer, limit, config.reward)
            verifiers = {prompt.verifier for prompts in self.benchmarks.values() for prompt in prompts}
        else:
            self.sources = load_sources(data, self.tokenizer, limit, config.run.seed, config.reward, stream)
            verifiers = set(self.sources.verifiers)
            self.benchmarks = {"held_out": self.sources.held_out} if self.sources.held_out else {}
            self.report = self.sources.report
        if ENVIRONMENT in verifiers and not self.environment:
            raise UserError(f"verifier {ENVIRONMENT!r} needs environment.factory; name another verifier in the data")
        self._verifiers = verifiers if not self.environment else set()
        program.on_check("data", self.report)

        # Join the other ranks last, so that an error above ends each of them at once.
        with span("waiting for other ranks"):
            self.grid = grid.build(config.parallel, seed=config.run.seed, phase_s=config.rollout.timeout_s + GRACE_S)
        self.is_main_rank = self.grid.rank == 0  # writes the files of the run and prints its progress
        program.on_check("ranks", self.grid.describe())
        self.job_end = JobEnd()
        self.stopped_by = ""
        self._kv_tokens = 0  # room for keys and values, set by `preflight`; 0 means as many as fit
        self._closing: list[Callable[[], Any]] = [grid.leave]  # called in reverse order

    def __enter__(self) -> Session:
        # Lock run.dir. All ranks raise UserError if another run writes there.
        self._is_new_folder = self.is_main_rank and not self.dir.exists()
        handle = self.share_errors(lambda: run_folder.lock(self.dir) if self.is_main_rank else None)
        if handle:
            self._closing.append(handle.close)
        self.share_errors(lambda: run_folder.keep_template_date(self.dir, self.template_date, self.is_main_rank))

        # Print stacks before the collectives that wait for a hanging rank time out.
        dump_stacks_after(0.8 * self.config.parallel.timeout_s)
        self._stalls = StallReporter(self.config.parallel.timeout_s)
        if cpu_bridge.on_gpu():  # gloo names late ranks itself
            self._stalls.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        dump_stacks_after(0.0)
        self._stalls.stop()
        if error is not None:
            self.grid.name_missing(error)
            if self._is_new_folder and set(os.listdir(self.dir)) <= {run_folder.LOCK, TEMPLATE_DATE}:
                shutil.rmtree(self.dir, ignore_errors=True)  # The command has written nothing yet.
            if not self.program.continues:
                return  # the process ends
        for close in reversed(self._closing):
            close()

    def share_errors(self, check: Callable[[], T]) -> T:
        """Return the result of `check` on this rank, or raise on all ranks if it raises UserError on one of them."""
        result = None
        error = ""
        try:
            result = check()
        except UserError as e:
            error = str(e)
        for text in filter(None, collectives.all_gather(error)):
            raise UserError(text)
        return typing.cast(T, result)

    def preflight(self) -> None:
        """Plan memory and disk space, and print the plan; a collective. Raises UserError if something does not fit."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        machines = memory_plan.Machines(self.grid.world_size, per_node, memory_plan.gpu_bytes())
        sources = self.sources
        lengths = [len(p.token_ids) for p in (*sources.representative_prompts(), *sources.held_out)]
        prompts = memory_plan.PromptSizes(longest=max(lengths), held_out=len(sources.held_out))
        teacher = self.share_errors(lambda: self.teacher_shape)
        if teacher:
            self.program.on_check("teacher", f"{teacher.layers} layers of {teacher.hidden}, tokenizer as model.path")
        plan, lines = self.share_errors(lambda: memory_plan.plan_run(self.config, self.shape, machines, prompts))
        self._kv_tokens = plan.kv_tokens(machines.gpu)
        disk = self.share_errors(lambda: run_folder.check_disk(self.config, self.shape, self.dir))
        if self.is_main_rank:
            print("\n".join(lines), flush=True)
        self.program.on_check("disk", disk)

    @span("checking the verifiers")
    def check_verifiers(self, prompts: Sequence[Prompt]) -> str:
        """Let verifiers, or the environment, score reference answers and other texts; return the result in words.

        Warnings go to stderr. Raises UserError, on all ranks, if a verifier or the environment fails. Collective.
        """

        def score_references() -> str:
            if not self.is_main_rank:
                return ""
            if self.environment:
                name = f"environment {self.config.environment.factory}"
                _, warnings = try_texts(self.environment_pool.play, name, prompts[:1])
                result = f"{name} plays episodes of one turn on row {prompts[0].id}"
            else:
                result, warnings = check_references(self.pool, prompts, self.config.reward)
            for warning in warnings:
                warn(warning)
            return result

        return self.share_errors(score_references)

    def _check_turns(self) -> Format:
        """Return the format of tool calls. Raises UserError if the chat template cannot frame turns and calls."""
        if not self.environment:
            return "tags"
        tools, data = self.environment.tools, self._data
        self._continuation([{"role": "tool" if tools else "user", "content": "x"}])  # may raise
        call_format = self.tokenizer.call_format(data.chat_template_kwargs) if tools and data.chat else "tags"
        names = ", ".join(tool["function"]["name"] for tool in tools)
        result = f"tools {names}, calls in format {call_format}" if tools else "observations of step"
        self.program.on_check("environment", result)
        return call_format

    def _continuation(self, messages: Sequence[Message], after_stop: bool = True) -> list[int]:
        """Return the tokens between two turns of the model: its stop token unless after_stop, and the messages."""
        return self.tokenizer.continuation(messages, self._data.chat, self._data.chat_template_kwargs, after_stop)

    def _data_config(self) -> DataConfig:
        """Return section [data] for reading rows. The tools of an environment become a variable of the chat template.

        Agents receive the prompt of a row as it is, and write the messages themselves.
        """
        data = self.config.data
        if self.agent:
            return replace(data, chat=False, chat_template_kwargs={})
        if self.environment is None:
            return data
        variables = dict(data.chat_template_kwargs)
        if self.environment.tools and data.chat:
            if self.tokenizer.template_reads("tools", self.environment.tools):
                variables["tools"] = list(self.environment.tools)
            elif int(os.environ.get("RANK", "0")) == 0:
                text = "has no variable tools, so prompts do not list the tools: describe them in data.system_prompt"
                warn(f"the chat template of {self.config.model.path} {text}")
        return replace(data, verifier=ENVIRONMENT, chat_template_kwargs=variables)

    def worker(self, optim: OptimConfig | None, kind: type[Worker] = Worker) -> Worker:
        """Return the model with the weights of model.path, and with new adapters with lora.rank.

        optim: None for a model that is not trained. It has no adapters.
        """
        options = self._stage_options()
        if optim is not None and self.config.lora.rank:
            options = replace(options, lora=self.config.lora, seed=self.config.run.seed)
        return self._load_weights(kind(self.shape, self.grid, options, optim))

    @functools.cached_property
    def teacher_shape(self) -> ModelShape | None:
        """The shape of the teacher, or None without one. Raises UserError if it cannot score the rollouts."""
        if not self.config.teacher.path:
            return None
        return check_teacher(self.config, self.tokenizer, context(self.config, self.shape))

    def teacher(self) -> Worker | None:
        """Return the model with the weights of teacher.path, which is not trained, or None without one."""
        if self.teacher_shape is None:
            return None
        worker = Worker(self.teacher_shape, self.grid, self._stage_options())
        return self._load_weights(worker, key="teacher.path", path=str(teacher_directory(self.config)))

    def critic(self) -> CriticWorker | None:
        """Return the critic with the weights of model.path, or None if algo.advantage needs none."""
        if self.config.algo.advantage != "gae":
            return None
        optim = critic_optim(self.config.critic, self.config.optim)
        return self._load_weights(CriticWorker(self.shape, self.grid, self._stage_options(), optim))

    def _stage_options(self) -> StageOptions:
        train = self.config.train
        parallel = self.config.parallel
        attention_only = RECOMPUTE_ATTENTION if train.recompute == "attention" else {}
        return StageOptions(
            tokens_per_micro_batch=memory_plan.micro_batch_tokens(self.config, cpu_bridge.on_gpu()),
            dtype=DTYPES[self.config.model.dtype],
            ops=self.ops,
            share_prompt=train.share_prompt,
            freeze_router=train.freeze_router,
            recompute=train.recompute == "full",
            offload=train.offload,
            distributed_optimizer=parallel.distributed_optimizer,
            overlap=parallel.overlap,
            fields={**fp8.settings(self.config.fp8), **attention_only},
        )

    @span("loading the weights")
    def _load_weights(self, stage: AnyStage, key: str = "model.path", path: str = "") -> AnyStage:
        """Load the weights of model.path, or of `path`, the value of `key`. Raises UserError if one is not finite."""
        path = path or self.config.model.path
        stage.load_hf(path)
        stage.require_finite(f"{key} = {path}", "give a model whose training did not diverge")
        return stage

    @functools.cached_property
    def started_verifiers(self) -> CheckedVerifiers:
        """The result of checking the verifiers of the data. Raises UserError if one cannot be used."""
        reward = self.program.reward
        checked = check_verifiers(self._verifiers - ({custom.IN_PROCESS} if reward else set()), self.config.reward)
        if reward:
            checked = replace(checked, sha256={**checked.sha256, custom.IN_PROCESS: source_sha256(reward)})
        if checked.unsandboxed and self.is_main_rank:
            warn(sandbox.WARNING)
        return checked

    @functools.cached_property
    def own_algorithm(self) -> dict[str, str]:
        """The SHA-256 of the user's advantage, loss and group function by name, after a trial of them; a collective.

        Raises UserError, on all ranks, if one cannot be used.
        """
        prompts, group = self.sources.representative_prompts()[:2], self.config.reward.group_function

        def call_functions() -> dict[str, str]:
            rows = [prompt.row() for prompt in prompts]
            hashes = trial.check_user_functions(self.config, rows, self.program.algorithm)
            if self.is_main_rank and is_function(group):
                for warning in try_group_function(self.pool, group, prompts, self.config.rollout.n):
                    warn(warning)
            return hashes

        return self.share_errors(call_functions)

    def fingerprint(self) -> Fingerprint:
        """Return the configuration and input hashes that a resumed run compares with those of its checkpoint."""
        functions = {**self.started_verifiers.sha256, **self.own_algorithm}
        if self.environment:
            functions[self.config.environment.factory] = self.environment.sha256
        if self.agent:
            functions[self.config.agent.function] = self.agent.sha256
        return run_folder.fingerprint(self.config, self.shape, functions, self.inputs(), self.teacher_shape)

    @span("hashing the inputs")
    def inputs(self) -> dict[str, str]:
        """Return the SHA-256 of the tokenizer, the data and, with adapters, the base weights; a collective."""
        path = Path(self.config.model.path)
        digests = self.sources.digests(path, self.template_date)
        if self.config.lora.rank:
            digest = self.share_errors(lambda: hugging_face.weights_sha256(path) if self.is_main_rank else "")
            digests[adapters.BASE_WEIGHTS] = collectives.all_gather(digest)[0]
        return digests

    @span("starting the engine")
    def rollouts(self) -> RolloutRunner:
        """Return the engine and the reward workers, which end with the session."""
        engine = self._torch_engine() if self.config.rollout.engine == "torch" else self._remote_engine()
        if self.environment:
            environment = self.config.environment
            turns = TurnEngine(engine, self.environment_pool, environment, self.tokenizer.decode, self._continuation)
            engine = typing.cast(RolloutEngine, turns)
        if self.agent:
            agents = self.agent.engine(engine, context(self.config, self.shape))
            self._closing.append(agents.close)
            engine = typing.cast(RolloutEngine, agents)
        watchdog = Watchdog(engine, self.config.rollout.timeout_s, self.grid.rank)

        return RolloutRunner(
            engine=watchdog,
            pool=self.pool,
            tokenizer=self.tokenizer,
            reward=self.config.reward,
            seed=self.config.run.seed,
            grid=self.grid,
            max_lost_share=self.config.rollout.max_lost_share,
            work_stealing=WorkStealing(network.shared_store()) if self.config.rollout.pull else None,
        )

    @functools.cached_property
    def pool(self) -> RewardPool:
        """The reward workers, which end with the session."""
        impure = self.started_verifiers.impure
        reward = self.config.reward
        pool = RewardPool(reward.workers, reward.timeout_s, impure=impure, function=self.program.reward)
        self._closing.append(pool.close)
        return pool

    @functools.cached_property
    def environment_pool(self) -> EnvironmentPool:
        """The processes of environments, which end with the session."""
        config = self.config.environment
        workers = self.config.reward.workers
        pool = EnvironmentPool(self._environment_class, workers, config.max_tool_seconds, self._tool_format)
        self._closing.append(pool.close)
        return pool

    def _torch_engine(self) -> RolloutEngine:
        return TorchEngine(
            shape=self.shape,
            names=hf_shapes(self.shape),
            device=cpu_bridge.default_device(),
            dtype=DTYPES[self.config.rollout.dtype],
            max_rows=self.config.rollout.max_num_seqs,
            sample=self.ops.sample_tokens,
            ops=self.ops.decode,
            memory=self.config.rollout.kv_cache_mib * 2**20,
            decode=self.tokenizer.decode_all,
        )

    def _remote_engine(self) -> RolloutEngine:
        from megatron_brorl.rollout.remote.remote_engine import connect_engine

        engine = connect_engine(
            self.config,
            names=hf_shapes(self.shape),
            context=context(self.config, self.shape),
            vocab=self.shape.vocab,
            stop_ids=self.stop_ids,
            kv_tokens=self._kv_tokens,
            decode=self.tokenizer.decode_all,
            routes=replays_routes(self.config, self.shape.experts),
        )
        self._closing.append(engine.close)
        return engine

    def writer(self, resume_step: int | None) -> MetricsWriter | None:
        """Return the writer of metrics on the main rank. resume_step: the first step to write; None for a new run."""
        if not self.is_main_rank:
            return None
        trackers = open_trackers(self.config.run.log, self.dir, resume_step, asdict(self.config))
        writer = MetricsWriter(self.dir, trackers, resume_step)
        self._closing.append(writer.close)
        return writer

    def recorder(self, resume_step: int | None) -> Recorder:
        """Return the writer of run.dir/rollouts. resume_step: the first step to write; None for a new run."""
        folder = self.dir / rollout_log.FOLDER
        if self.is_main_rank:
            rollout_log.prepare_folder(folder, resume_step)
        return Recorder(folder, self.config, self.tokenizer.decode, self.stop_ids, self.grid.rank)

    def stop_requested(self, save_s: float = 0.0) -> bool:
        """Return whether to save and stop, the same on all ranks, and set `stopped_by`; called between steps.

        save_s: seconds of saving after the next step.
        """
        on_this_rank = {
            "signal": signals.stop_requested(),
            "late": not self.job_end.step_fits(save_s),
            "callback": self.program.callbacks.stop,
        }
        reasons = collectives.all_reduce_max({name: float(value) for name, value in on_this_rank.items()})
        if reasons["signal"]:
            self.stopped_by = "stopped by a signal"
        elif reasons["callback"]:
            self.stopped_by = "stopped by a callback"
        elif reasons["late"]:
            end = time.strftime("%H:%M:%S", time.localtime(self.job_end.at))
            self.stopped_by = f"the job ends at {end}, and a step takes up to {self.job_end.step_s():.0f} s"
        return any(reasons.values())

    @span("exporting the model")
    def export(self, worker: Worker, card: TrainingFacts) -> bool:
        """Write run.dir/model, a Hugging Face directory, and return on the main rank whether the weights changed.

        With lora.rank, the weights are merged, and run.dir/adapter has the adapters.
        Raises UserError if a weight is not finite.
        """
        worker.require_finite("the trained model", f"{self.dir / 'model'} is not written; lower the learning rate")
        tensors = worker.hf_tensors()
        differs = False
        if self.is_main_rank:
            dtype = str(worker.options.dtype).removeprefix("torch.")
            source = self.config.model.path
            differs = hugging_face.save(tensors, source, self.dir / "model", dtype, model_card(card))
        else:
            deque(tensors, maxlen=0)  # The stream is a collective.
        if self.config.lora.rank:
            tensors = worker.adapter_tensors()
            if self.is_main_rank:
                with hugging_face.atomic_directory(self.dir / "adapter") as aside:
                    adapters.write_peft(tensors, self.config.lora, self.base, aside)
            else:
                deque(tensors, maxlen=0)
        dist.barrier()
        return differs

    def card(self, how: str, tag: str, sizes: Mapping[str, int], began: float) -> TrainingFacts:
        """Return the content of the exported model's card. The arguments are fields of TrainingFacts."""
        return TrainingFacts(
            run=self.dir.name,
            how=how,
            tag=tag,
            base=InitialModel.of(self.base, Path(self.config.model.path)),
            sizes=[(name, str(value)) for name, value in sizes.items()],
            files=self.sources.files,
            tasks=[task.name for task in self.config.data.tasks],
            began=began,
        )

    def peak_rss_mib(self) -> float:
        """Return the sum of the ranks' peak resident memory and of their children's own memory."""
        own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        # A forked process shares most of its pages with its parent.
        children_mib = sum(p.memory_full_info().uss for p in psutil.Process().children(recursive=True)) / 2**20
        return collectives.all_reduce_sum({"mib": own_mib + children_mib})["mib"]


SLURM_END = "SLURM_JOB_END_TIME"  # Unix time, in the environment of a job's steps
_STEPS = 5  # number of last steps to consider, because evaluations and checkpoints make some of them longer


class JobEnd:
    """The end of the job, as set by the scheduler. A step that would not end before it is not started."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Read the end of the job from the environment. Raises UserError if it is not a number."""
        slurm = os.environ.get(SLURM_END, "")
        try:
            self.at = float(slurm or 0)  # 0 means never
        except ValueError:
            raise UserError(f"{SLURM_END} = {slurm}: must be a Unix time; unset it") from None
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds
        self._last_call: float | None = None

    def step_fits(self, save_s: float = 0.0) -> bool:
        """Return whether a step as long as the longest of the last ones ends before the job; called once per step.

        save_s: seconds of saving after it, which the steps so far do not include.
        """
        now = self._clock()
        if self._last_call is not None:
            self._steps.append(now - self._last_call)
        self._last_call = now
        return not self.at or now + self.step_s() + save_s < self.at

    def step_s(self) -> float:
        """Return the seconds of the longest of the last steps, or 0 before the second one."""
        return max(self._steps, default=0.0)
