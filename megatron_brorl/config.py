"""The configuration of a run: frozen sections, a TOML file, and `section.key=value` overrides.

Strict: an unknown section, an unknown key or a value of the wrong type is an error that names it. What can be
checked without loading anything is checked here; what needs the model or the world size is checked where those
are known (`parallel.grid`, `models.gpt`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_brorl.config_toml import build, override
from megatron_brorl.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_AT_LEAST_ONE = (
    "rollout.prompts rollout.max_tokens rollout.max_rows reward.workers reward.max_chars algo.mini_batches algo.epochs "
    "parallel.tensor parallel.pipeline train.keep_checkpoints evaluate.samples "
    "evaluate.bootstrap sft.examples_per_step data.held_out_prompts trtllm.tensor trtllm.max_num_tokens "
    "fp8.amax_history"
)
_NOT_NEGATIVE = (
    "train.steps train.checkpoint_every evaluate.every optim.warmup_steps sft.steps sft.warmup_steps rollout.top_k "
    "evaluate.top_k model.context algo.is_cap optim.lr optim.clip_grad sft.lr evaluate.temperature algo.entropy_coef "
    "algo.aggregation_tokens rollout.memory_mib rollout.partial_tokens rollout.most_carried "
    "train.tokens_per_micro_batch trtllm.restarts fp8.bf16_layers"
)


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/default"  # metrics, checkpoints, plots and the trained model go here
    seed: int = 0  # the only seed: data order and every random stream derive from it
    started: float = 0.0  # Unix time at which the whole job began, where this command is not its first; 0 = now


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # Hugging Face directory: config.json, *.safetensors, tokenizer
    dtype: Literal["fp32", "bf16"] = "fp32"  # of weights and activations; the optimizer keeps fp32 masters
    context: int = 0  # prompt + response tokens at most; 0 = max_position_embeddings of config.json


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False  # Megatron's sequence parallelism (needs tensor > 1)
    distributed_optimizer: bool = False  # ZeRO-1; its checkpoints need a GPU
    overlap_grad_reduce: bool = False  # gradients are summed over data-parallel ranks while the backward pass goes on
    # A collective that waits longer ends the run; ranks that wait for another's rollouts wait rollout.timeout_s more.
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Fp8Config:
    """Training in FP8 by Transformer Engine's layers, on GPUs that have it (models.fp8 checks)."""

    # tensorwise scales by the current maximum, delayed by past ones, blockwise per 128 x 128; mxfp8 needs Blackwell
    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"
    format: Literal["e4m3", "hybrid"] = "hybrid"  # hybrid: gradients in e5m2
    parameters: bool = False  # the weights of linears are stored in FP8, beside the optimizer's fp32 masters
    bf16_layers: int = 0  # at each end of the model that stay in bf16; not with recipe = "delayed"
    amax_history: int = 1024  # steps that recipe = "delayed" looks back


@dataclass(frozen=True)
class TaskConfig:
    """One reasoning-gym task of a generated data set."""

    name: str
    weight: float = 1.0
    keep: str = ""  # regex; its first group is the prompt (strips the English template); "" = whole question
    config: dict[str, Any] = field(default_factory=dict)  # keywords of reasoning_gym.create_dataset


@dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = ()  # JSONL or Parquet files
    held_out: tuple[str, ...] = ()
    tasks: tuple[TaskConfig, ...] = ()  # generated instead of files
    train_seed: int = 1
    held_out_seed: int = 2
    held_out_prompts: int = 512  # how many are generated; files are used whole
    template: str = "{prompt}"  # wraps the text of every prompt
    chat: bool = False  # wrap in the tokenizer's chat template as one user message
    skip_bad_rows: bool = False  # skip, count and list malformed rows instead of stopping


@dataclass(frozen=True)
class RolloutConfig:
    n: int = 512  # rollouts per prompt
    prompts: int = 128  # prompts per step, over all ranks
    engine: Literal["torch", "trtllm"] = "torch"  # built in, or TensorRT-LLM (section trtllm)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    max_tokens: int = 1024  # of a response
    max_rows: int = 2048  # rollouts decoded at a time on one rank
    memory_mib: int = 0  # for keys and values on one rank; what does not fit waits. 0 = half of what is free
    stop_strings: tuple[str, ...] = ()  # a response ends when its text contains one, besides the model's stop tokens
    dtype: Literal["fp32", "bf16"] = "fp32"
    # A step's sampling on one rank; rollouts that have not ended half-way are named. Then it is told to stop, and what
    # does not end is lost, or carried to the next step where there are partial rollouts.
    timeout_s: float = 1800.0
    most_lost: float = 0.1  # share of a step's rollouts; the others are trained on. More end the run; 0: any does
    # Tokens that one step adds to a response at most; the rest follows in the next steps, and a group is trained on
    # when its last sibling has ended. 0 = responses are sampled whole.
    partial_tokens: int = 0
    most_carried: int = 8  # steps that a group is carried over at most; what has not ended then is lost


@dataclass(frozen=True)
class TrtLlmConfig:
    """TensorRT-LLM engines, each a process in an environment of its own; read where rollout.engine = "trtllm"."""

    python: str = ""  # interpreter of the environment that has tensorrt_llm; "" = the one that runs the trainer
    tensor: int = 1  # tensor-parallel size of an engine, which so many neighbouring ranks of a node share
    sampler: Literal["auto", "TRTLLMSampler", "TorchSampler"] = "auto"  # auto: the one that takes a seed per request
    memory_fraction: float = 0.5  # of the free GPU memory, for keys and values
    kv_dtype: Literal["auto", "fp8"] = "auto"  # of keys and values; auto: that of the model
    quantization: Literal["none", "fp8_block"] = "none"  # of weights: one scale per 128 x 128 block, or rollout.dtype
    max_num_tokens: int = 8192  # that an engine computes at a time
    cuda_graphs: bool = True
    # How weights reach the engine. auto: CUDA IPC where both have one torch and share one GPU, host memory elsewhere.
    transport: Literal["auto", "cuda_ipc", "host"] = "auto"
    shared_memory: str = "/dev/shm"  # folder in memory; holds the weights once per engine, twice during an update
    start_timeout_s: float = 1200.0  # until a process answers first
    silent_s: float = 60.0  # a process that does not answer for so long is started again
    restarts: int = 3  # without a call of generate in between; then the run ends


@dataclass(frozen=True)
class RewardConfig:
    workers: int = 2  # scoring processes per rank
    timeout_s: float = 5.0  # per answer; a worker that takes longer is killed and the answer scores 0
    max_chars: int = 4096  # a longer answer scores 0 unseen
    extract: Literal["full", "answer_tag", "boxed"] = "full"  # what part of the response is the answer
    strict: bool = True  # 1 if the verifier gives at least 0.99, else 0; false keeps partial credit


@dataclass(frozen=True)
class AlgoConfig:
    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 0.0  # bound above 1 on the ratio of tokens with negative advantage; 0 = none
    ratio: Literal["token", "sequence"] = "token"  # importance ratio of each token, or one per sequence (GSPO)
    is_cap: float = 2.0  # truncated importance sampling between engine and trainer; 0 = off
    entropy_coef: float = 0.0  # bonus for entropy in the loss
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    aggregation_tokens: int = 0  # the divisor per sequence of aggregation = "fixed"
    old_log_probs: Literal["actor", "rollout"] = "actor"  # "rollout" saves a forward pass where engine == trainer
    mini_batches: int = 1  # optimizer steps per sampled batch
    mini_batch_of: Literal["prompts", "siblings"] = "prompts"  # whole groups each, or a part of every group
    epochs: int = 1


@dataclass(frozen=True)
class OpsConfig:
    # "fused": csrc's kernels, of which the loss never holds the logits; "reference": plain torch that defines them
    implementation: Literal["reference", "fused"] = "fused"


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6
    warmup_steps: int = 0  # linear, in optimizer steps
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    # A micro-batch is filled up to this many tokens. 0 = 2,048 on a CPU, where more only take memory, 16,384 on a GPU.
    tokens_per_micro_batch: int = 0
    recompute: bool = False  # recompute activations in the backward pass
    recompute_attention: bool = False  # recompute the core of attention alone
    offload: bool = False  # weights and optimizer wait in host memory while the engine generates
    # Siblings share one copy of their prompt in a micro-batch, where that saves a tenth of the tokens; CPU only so far.
    share_prompt: bool = True
    checkpoint_every: int = 50  # steps; 0 = only at the end
    keep_checkpoints: int = 2
    resume: Literal["auto", "never"] = "auto"
    verify_reshard: bool = False  # after each refit, compare log-probs of a probe batch on engine and actor
    verify_tolerance: float = 1e-4  # nats that they may differ by; bf16 on either side needs more


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 0  # steps; 0 = only before and after
    samples: int = 8  # k per prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    bootstrap: int = 2000  # resamples of the prompts for the 95% interval


@dataclass(frozen=True)
class SftConfig:
    steps: int = 200
    examples_per_step: int = 256
    lr: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trtllm: TrtLlmConfig = field(default_factory=TrtLlmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sft: SftConfig = field(default_factory=SftConfig)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check the result.

    Raises UserError naming the file and key for anything unknown, mistyped or out of range.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not valid TOML: {e}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    for item in overrides:
        override(table, item)
    config = build(Config, table, str(path), "")
    validate(config, str(path))
    return config


def validate(config: Config, where: str) -> None:
    """Range checks that need nothing but the configuration itself."""

    def need(ok: bool, key: str, what: str) -> None:
        if not ok:
            section, name = key.split(".")
            value = getattr(getattr(config, section), name)
            raise UserError(f"{where}: {key} = {value!r}: {what}")

    need(config.rollout.n >= 2, "rollout.n", "a group baseline needs at least 2 rollouts per prompt")
    for key in _AT_LEAST_ONE.split():
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) >= 1, key, "must be at least 1")
    for key in _NOT_NEGATIVE.split():
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) >= 0, key, "must not be negative")
    need(config.rollout.temperature > 0, "rollout.temperature", "must be above 0 (sampling needs randomness)")
    need(0 < config.rollout.top_p <= 1, "rollout.top_p", "must be in (0, 1]")
    need(all(config.rollout.stop_strings), "rollout.stop_strings", "an empty string would stop everything")
    need(0 < config.evaluate.top_p <= 1, "evaluate.top_p", "must be in (0, 1]")
    need(
        0 < config.rollout.timeout_s < math.inf,
        "rollout.timeout_s",
        "must be above 0 and finite: no step waits for ever",
    )
    need(0 <= config.rollout.most_lost <= 1, "rollout.most_lost", "must be in [0, 1]")
    _validate_partial(config, need)
    _validate_trtllm(config, need)
    _validate_fp8(config, need)
    _validate_memory(config, need)
    need(config.reward.timeout_s > 0, "reward.timeout_s", "must be above 0")
    need(config.train.verify_tolerance > 0, "train.verify_tolerance", "must be above 0")
    need(config.parallel.timeout_s > 0, "parallel.timeout_s", "must be above 0")
    need(0 < config.algo.eps_low < 1, "algo.eps_low", "must be in (0, 1)")
    need(config.algo.eps_high > 0, "algo.eps_high", "must be above 0")
    need(
        config.algo.dual_clip == 0 or config.algo.dual_clip > 1 + config.algo.eps_high,
        "algo.dual_clip",
        "must be 0 (off) or above 1 + algo.eps_high",
    )
    need(
        config.algo.aggregation != "fixed" or config.algo.aggregation_tokens > 0,
        "algo.aggregation_tokens",
        'algo.aggregation = "fixed" divides by it: give the tokens per sequence, for example rollout.max_tokens',
    )
    need(all(0 <= b < 1 for b in config.optim.betas), "optim.betas", "must be in [0, 1)")
    need("{prompt}" in config.data.template, "data.template", "must contain {prompt}")
    need(
        not (config.data.tasks and (config.data.train or config.data.held_out)),
        "data.tasks",
        "give either generated tasks or files (data.train, data.held_out), not both",
    )
    need(config.data.train_seed != config.data.held_out_seed, "data.held_out_seed", "must differ from data.train_seed")
    need(
        not config.parallel.sequence or config.parallel.tensor > 1,
        "parallel.sequence",
        "sequence parallelism needs parallel.tensor > 1",
    )
    need(
        config.rollout.prompts >= config.algo.mini_batches,
        "algo.mini_batches",
        f"cannot cut {config.rollout.prompts} prompts (rollout.prompts) into that many mini-batches",
    )


def _validate_partial(config: Config, need: Callable[[bool, str, str], None]) -> None:
    rollout = config.rollout
    if not rollout.partial_tokens:
        return
    steps = -(-rollout.max_tokens // rollout.partial_tokens)
    need(
        rollout.most_carried >= steps - 1,
        "rollout.most_carried",
        f"a response of rollout.max_tokens = {rollout.max_tokens} at {rollout.partial_tokens} tokens per step "
        f"(rollout.partial_tokens) is carried over {steps - 1} steps: all long responses would be lost",
    )
    need(
        config.algo.old_log_probs == "actor",
        "algo.old_log_probs",
        "partial rollouts (rollout.partial_tokens) come from older weights than the actor's: must be 'actor'",
    )


def _validate_trtllm(config: Config, need: Callable[[bool, str, str], None]) -> None:
    t = config.trtllm
    need(0 < t.memory_fraction < 1, "trtllm.memory_fraction", "must be in (0, 1)")
    need(t.start_timeout_s > 0, "trtllm.start_timeout_s", "must be above 0")
    need(t.silent_s >= 5, "trtllm.silent_s", "must be at least 5: an engine process reports twice a second")
    need(
        t.tensor == 1 or t.transport != "cuda_ipc",
        "trtllm.transport",
        'with trtllm.tensor > 1 a rank reaches its own GPU alone: must be "host" or "auto"',
    )
    need(
        config.rollout.engine != "trtllm" or not config.rollout.stop_strings,
        "rollout.stop_strings",
        'rollout.engine = "trtllm" is given token ids and stops at tokens alone: must be empty',
    )


def _validate_fp8(config: Config, need: Callable[[bool, str, str], None]) -> None:
    f = config.fp8
    on = f.recipe != "none"
    need(not on or config.model.dtype == "bf16", "model.dtype", "fp8.recipe works beside bf16: must be 'bf16'")
    need(on or not f.parameters, "fp8.parameters", "needs an fp8.recipe")
    need(on or not f.bf16_layers, "fp8.bf16_layers", "needs an fp8.recipe")
    need(f.recipe != "delayed" or not f.bf16_layers, "fp8.bf16_layers", 'must be 0 with fp8.recipe = "delayed"')


def _validate_memory(config: Config, need: Callable[[bool, str, str], None]) -> None:
    t = config.train
    need(
        not (t.recompute and t.recompute_attention),
        "train.recompute_attention",
        "train.recompute recomputes attention too: give one of them",
    )
    need(
        not (t.offload and config.fp8.parameters),
        "train.offload",
        "FP8 parameters (fp8.parameters) cannot be moved: must be false",
    )
