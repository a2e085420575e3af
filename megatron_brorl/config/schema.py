"""The configuration of a run: frozen pydantic dataclasses, one per section of the TOML file.

A field holds the type, default, bounds and description of a key. `brorl config` prints them, config/load.py reads a
file into these classes, and config/rules.py checks what keys require of each other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

T = TypeVar("T")
# What every value must keep to: no conversion between types, no unknown keys, no inf and no nan.
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(cls: type[T]) -> type[T]:
    """Make a class of keys a frozen dataclass that checks its values."""
    made: Any = dataclass(frozen=True, config=_STRICT)(cls)
    return cast("type[T]", made)


def key(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field with its default, its description and bounds such as ge=1."""
    return Field(default, description=description, **bounds)


Beta = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


@section
class RunConfig:
    """Output folder, seed and logging."""

    dir: str = key("runs/default", "Folder of metrics, checkpoints, plots and model/. No input may lie in it.")
    seed: int = key(0, "Seed from which the order of the data and every random stream derive.")
    record_groups: int = key(
        4, "Groups per step whose rollouts run.dir/rollouts stores with their texts; evaluations store all.", ge=0
    )
    log: tuple[Tracker, ...] = key(
        ("tensorboard",),
        "Trackers that receive the metrics besides metrics.jsonl, if they are installed. W&B and MLflow use the "
        'project "brorl", or what their environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI) say.',
    )
    trace_every: int = key(
        0, "Steps from one trace of all ranks (run.dir/traces/step_000010.json) to the next; 0 = never.", ge=0
    )


@section
class ModelConfig:
    """The model that is trained."""

    path: str = key("", "Hugging Face directory, or the name of a model on the hub (Qwen/Qwen2.5-0.5B).")
    dtype: Literal["fp32", "bf16"] = key("fp32", "Type of weights and activations; the optimizer keeps fp32 weights.")
    context: int = key(0, "Prompt and response tokens, at most; 0 = max_position_embeddings of config.json.", ge=0)


@section
class ParallelConfig:
    """Distribution of the training over ranks. Data parallelism uses the ranks that the sizes below leave."""

    tensor: int = key(1, "Tensor-parallel size: ranks over which every layer is split.", ge=1)
    pipeline: int = key(1, "Pipeline-parallel size: consecutive stages of layers.", ge=1)
    context: int = key(1, "Context-parallel size: ranks over which the tokens of a sequence are split.", ge=1)
    sequence: bool = key(False, "Sequence parallelism of Megatron; needs parallel.tensor > 1.")
    distributed_optimizer: bool = key(
        False, "Shard the optimizer over data-parallel ranks (ZeRO-1). Resume with the same tensor and pipeline sizes."
    )
    overlap: bool = key(
        False,
        "Overlap communication with computation: the sum of gradients with the backward pass and, with the distributed "
        "optimizer, the gathering of weights with the forward pass.",
    )
    timeout_s: float = key(
        600.0, "Seconds that a collective may wait; waiting for rollouts may take rollout.timeout_s more.", gt=0
    )


@section
class Fp8Config:
    """Training in FP8 with Transformer Engine, on GPUs that support it."""

    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "none",
        'Scaling: "tensorwise" by the current maximum, "delayed" by past ones, "blockwise" per 128 x 128 block; '
        '"mxfp8" needs Blackwell.',
    )
    format: Literal["e4m3", "hybrid"] = key("hybrid", 'Number format; "hybrid" stores gradients in e5m2.')
    parameters: bool = key(
        False, "Store the weights of linear layers in FP8, next to the fp32 weights of the optimizer."
    )
    bf16_layers: int = key(0, 'Layers at each end of the model that stay in bf16; 0 with recipe = "delayed".', ge=0)


@section
class ColumnsConfig:
    """Columns of files that do not use this project's names. "a.b" is b within a.

    If one is named, only named columns are read. The sources of a mixture share one mapping.
    """

    prompt: str = key("", 'Text, or a list of messages; "" = "prompt".')
    answer: str = key("", 'Reference answer, text or a number; "" = "answer".')
    answer_regex: str = key(
        "",
        "Part of that column that is the answer: the first group of the last match, as '#### (.+)'; \"\" = all of it.",
    )
    target: str = key("", 'What `brorl sft` learns, if it is not the answer; "" = "target".')
    verifier: str = key("", 'Name of the verifier of the row; "" = "verifier".')
    id: str = key("", 'Unique in its file; "" = "id".')
    metadata: str = key("", 'What the verifier needs besides the answer; "" = "metadata".')


@section
class TaskConfig:
    """A reasoning-gym task that generates prompts."""

    name: str = Field(description="Name in reasoning-gym.")
    weight: float = key(1.0, "Share of the prompts, relative to the sum of all weights.", gt=0)
    prompt_regex: str = key("", 'Regular expression whose first group is the prompt; "" = the whole question.')
    config: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of reasoning_gym.create_dataset."
    )


@section
class MixtureConfig:
    """A source of a mixture of files."""

    files: tuple[str, ...] = Field(description="JSONL or Parquet files, shuffled in every epoch of this source.")
    weight: float = Field(gt=0, description="Share of the prompts of every step, relative to the sum of all weights.")
    name: str = key("", 'Name in reports; "" = the name of the first file without its suffix.')
    verifier: str = key("", 'Verifier of rows that name none; "" = data.verifier.')


@section
class DataConfig:
    """Prompts: files, mixtures of files, or generated tasks.

    A file is a JSONL or Parquet path, or hf://datasets/OWNER/NAME/FILE on the Hugging Face hub.
    """

    train: tuple[str, ...] = key((), "Files to train on, shuffled in every epoch.")
    mixture: tuple[MixtureConfig, ...] = key((), "Sources with a share of every step each, instead of data.train.")
    held_out: tuple[str, ...] = key((), "Files to evaluate on; never trained on.")
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    tasks: tuple[TaskConfig, ...] = key((), "Tasks that generate prompts, instead of files.")
    train_seed: int = key(1, "Seed of the generated training prompts.")
    held_out_prompts: int = key(512, "Held-out prompts that are generated; files are used whole.", ge=1)
    verifier: str = key("exact", 'Verifier of rows that name none; "my_rewards.py:score" is a function of your own.')
    template: str = key("{prompt}", "Text around every prompt.")
    chat: bool = key(
        False,
        "Apply the chat template of the tokenizer: to the prompt as one user message, or to the messages of a row.",
    )
    system_prompt: str = key("", "System message before the messages of every row; needs data.chat.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, as {enable_thinking = false}; needs data.chat.",
    )


@section
class RolloutConfig:
    """Sampling of responses."""

    n: int = key(512, "Rollouts per prompt.", ge=1)
    prompts: int = key(128, "Prompts per step, over all ranks. A step may contain a prompt twice, as two groups.", ge=1)
    engine: Literal["torch", "trtllm", "vllm"] = key(
        "torch", 'Engine: built in ("torch"), or TensorRT-LLM or vLLM in processes of their own (section [engine]).'
    )
    temperature: float = key(1.0, "Sampling temperature.", gt=0)
    top_p: float = key(1.0, "Sample from the most likely tokens with this total probability.", gt=0, le=1)
    top_k: int = key(0, "Sample from so many of the most likely tokens; 0 = all.", ge=0)
    max_tokens: int = key(1024, "Tokens of a response, at most.", ge=1)
    max_num_seqs: int = key(2048, "Rollouts that one rank decodes at a time, at most.", ge=1)
    pull: bool = key(
        False,
        "Give waiting rollouts to the engine that has room (work stealing). Batches then depend on timing, so runs no "
        "longer repeat bit for bit.",
    )
    kv_cache_mib: int = key(
        0, "MiB for the built-in engine's keys and values on a rank; 0 = half of what is free.", ge=0
    )
    stop_strings: tuple[str, ...] = key((), "Strings that end a response, besides the stop tokens of the model.")
    dtype: Literal["fp32", "bf16"] = key("fp32", "Type of the engine's weights, keys and values.")
    timeout_s: float = key(
        1800.0,
        "Seconds of sampling in a step. Rollouts that are not done by then are lost, or carried over with "
        "rollout.partial_tokens.",
        gt=0,
    )
    max_lost_share: float = key(0.1, "Share of a step's rollouts that may be lost before the run ends.", ge=0, le=1)
    partial_tokens: int = key(
        0,
        "Tokens that a step adds to a response, at most; the next steps sample the rest, and a group is trained on "
        "when all its rollouts are done. 0 = sample responses whole.",
        ge=0,
    )
    refills: int = key(
        0,
        "Rounds of more prompts that a step samples, at most, while dynamic sampling has kept fewer than "
        "rollout.prompts groups. Surplus groups are trained on in the next step.",
        ge=0,
    )
    max_carried_steps: int = key(8, "Steps that an unfinished group is carried over, at most; then it is lost.", ge=0)


@section
class EngineConfig:
    """The engine processes of rollout.engine = "vllm" or "trtllm". The built-in engine has no such process."""

    python: str = key("", 'Interpreter of the environment that has the engine; "" = that of the trainer.')
    tensor: int = key(1, "Tensor-parallel size of an engine; so many neighbouring ranks of a node share it.", ge=1)
    memory_fraction: float = key(
        0.85,
        "Share of the GPU memory. vLLM: of all memory, for weights, keys and values. TensorRT-LLM: of what the trainer "
        "and the engine's weights leave, for keys and values.",
        gt=0,
        lt=1,
    )
    kv_dtype: Literal["auto", "fp8"] = key("auto", 'Type of keys and values; "auto" = rollout.dtype.')
    quantization: Literal["none", "fp8"] = key(
        "none",
        "Quantization of the weights. vLLM quantizes them as they arrive; for TensorRT-LLM the trainer sends FP8 with "
        "a scale per 128 x 128 block.",
    )
    max_num_tokens: int = key(8192, "Tokens that an engine computes in one step, at most.", ge=1)
    cuda_graphs: bool = key(True, "Use CUDA graphs (and compilation in vLLM) on a GPU.")
    shared_memory: str = key("/dev/shm", "Folder in memory for the weights: one copy per node, two during an update.")
    start_timeout_s: float = key(1200.0, "Seconds until a new process answers, at most.", gt=0)
    heartbeat_timeout_s: float = key(
        60.0,
        "Seconds without a sign of life, or within one part of a weight update, after which a process is restarted. "
        "It must exceed the longest step of the engine.",
        ge=5,
    )
    max_restarts: int = key(3, "Restarts without a completed call in between, after which the run ends.", ge=0)


@section
class RewardConfig:
    """Scoring of responses."""

    workers: int = key(2, "Scoring processes per rank.", ge=1)
    timeout_s: float = key(5.0, "Seconds per answer, after which its worker is killed and the answer scores 0.", gt=0)
    max_chars: int = key(65536, "Characters of an answer; a longer one scores 0. Some verifiers allow fewer.", ge=1)
    extract: Literal["verifier", "full", "answer_tag", "boxed"] = key(
        "verifier",
        'Part of a response that is the answer: what the verifier of the row looks for ("verifier"), or this.',
    )
    unsandboxed: bool = key(False, "Run programs of the model without isolation, even if there is no sandbox.")
    correct_at: float = key(
        1.0,
        "Smallest reward of a correct response, in pass@k and every other count. A response that could not be scored, "
        "or that was cut off with cut_off_factor below 1, is never correct.",
    )
    strict: bool = key(
        False, "Train on 1 for a correct response and 0 for any other, instead of the verifier's reward."
    )
    cut_off_factor: float = key(
        0.0,
        "Factor on the reward of a response that rollout.max_tokens cut off. Negative rewards stay as they are.",
        ge=0,
        le=1,
    )


@section
class ShapingConfig:
    """Terms that are added to rewards before advantages are computed. Groups are selected by the unshaped rewards."""

    overlong_tokens: int = key(
        0, "Tokens below rollout.max_tokens over which a length penalty grows linearly from 0 to 1; 0 = off.", ge=0
    )
    cosine_coef: float = key(
        0.0,
        "Coefficient of the length reward of a correct response of t tokens, cosine_min + (cosine_max - cosine_min) "
        "(1 + cos(pi t / rollout.max_tokens)) / 2.",
    )
    cosine_min: float = key(-0.5, "Length reward of the longest response.")
    cosine_max: float = key(0.0, "Length reward of the shortest response.")
    cosine_on_steps: int = key(100, "Consecutive steps with the length reward.", ge=0)
    cosine_off_steps: int = key(500, "Consecutive steps without the length reward, in turn; 0 = always on.", ge=0)
    repetition_ngram: int = key(0, "Tokens of an n-gram that is penalised if it repeats in a response; 0 = off.", ge=0)
    repetition_penalty: float = key(0.001, "Penalty for each repeated n-gram.", ge=0)

    @property
    def is_on(self) -> bool:
        """Return whether any term is added."""
        return bool(self.overlong_tokens or self.cosine_coef or self.repetition_ngram)


Advantage = Literal["reinforce_pp_baseline", "grpo", "maxrl", "pass_at_k", "gae"]


@section
class AlgoConfig:
    """Advantages and the policy loss."""

    advantage: Advantage = key(
        "reinforce_pp_baseline",
        '"reinforce_pp_baseline": reward minus the mean of its group, whitened over the step. "grpo": also divided by '
        'the standard deviation of the group. "maxrl": also divided by the mean of the group. "pass_at_k": the '
        'contribution to pass@k, whitened over the step. "gae": generalised advantages of a critic, whitened over the '
        "tokens of the step.",
    )
    pass_k: int = key(0, 'k of advantage = "pass_at_k", below rollout.n; 0 with any other.', ge=0)
    gamma: float = key(1.0, 'Discount per token of advantage = "gae".', ge=0, le=1)
    lam: float = key(1.0, 'Lambda of advantage = "gae": 1 trusts the rewards, 0 the critic.', ge=0, le=1)
    dynamic_sampling: bool = key(True, "Train only on groups whose rewards differ.")
    correct_boost: float = key(0.0, "Added to the advantages of correct responses.")
    overlong_filter: bool = key(False, "No loss on responses that were cut off; baselines still include them.")
    kl_coef: float = key(0.0, "Coefficient of the KL divergence to the reference policy; 0 = no reference.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k2", "Estimator of the KL divergence. In the loss only k2 has the gradient of KL(pi || reference)."
    )
    kl_in: Literal["loss", "reward"] = key("loss", "Where the KL divergence to the reference policy counts.")
    policy_loss: Literal["clip", "cispo", "sapo"] = key(
        "clip",
        '"clip": clipped surrogate of PPO with separate bounds (DAPO). "cispo": bounds on the importance weight only, '
        'so that every token keeps its gradient (MiniMax-M1). "sapo": a smooth gate instead of bounds (SAPO).',
    )
    eps_low: float = key(0.2, "Lower bound of the ratio is 1 - eps_low.", gt=0, lt=1)
    eps_high: float = key(0.28, "Upper bound of the ratio is 1 + eps_high.", gt=0)
    dual_clip: float = key(0.0, 'Upper bound of the ratio at negative advantages, with "clip"; 0 = none.')
    ratio: Literal["token", "sequence"] = key("token", "Importance ratio per token, or per sequence (GSPO).")
    is_cap: float = key(
        2.0,
        "Cap of truncated importance sampling between engine and trainer; 0 = off. With rollout.top_p or top_k the "
        "weight of a token includes the probability that was cut.",
        ge=0,
    )
    mismatch_mask: Literal["off", "token", "sequence"] = key(
        "off",
        "No loss on tokens (or sequences, by the geometric mean of their tokens) whose pi_old / pi_rollout lies "
        "outside mismatch_bounds. They still count in the divisor of the loss.",
    )
    mismatch_bounds: tuple[float, float] = key((0.5, 5.0), "Interval of mismatch_mask.")
    entropy_coef: float = key(0.0, "Coefficient of the entropy bonus in the loss.", ge=0)
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = key(
        "token_mean",
        'Divisor of the loss. "token_mean": the tokens of a mini-batch. "sequence_mean": the tokens of each sequence, '
        'then their number. "fixed": aggregation_tokens per sequence (Dr. GRPO).',
    )
    aggregation_tokens: int = key(0, 'Divisor per sequence of aggregation = "fixed".', ge=0)
    old_log_probs: Literal["actor", "rollout"] = key(
        "actor",
        '"rollout" takes the log-probabilities of the engine, which saves a forward pass if engine and trainer agree. '
        "It needs rollout.top_p = 1 and rollout.top_k = 0.",
    )
    mini_batches: int = key(1, "Optimizer steps per step.", ge=1)
    mini_batch_of: Literal["prompts", "siblings"] = key(
        "prompts", 'What a mini-batch contains: whole groups ("prompts"), or a part of every group ("siblings").'
    )
    epochs: int = key(1, "Passes over the mini-batches of a step.", ge=1)


@section
class CriticConfig:
    """The critic of algo.advantage = "gae". Its optimizer uses the other settings of [optim]."""

    lr: float = key(1e-5, "Learning rate of the critic.", ge=0)
    lr_warmup_steps: int = key(0, "Linear warm-up of the learning rate, in optimizer steps of the critic.", ge=0)
    warmup_steps: int = key(
        0, "First training steps in which only the critic is trained. Steps without an update do not count.", ge=0
    )
    clip: float = key(0.2, "Clip range of the value loss around the old values; 0 = no clipping.", ge=0)


@section
class ReferenceConfig:
    """Resets of the reference policy of algo.kl_coef, which is the actor at the start or at the last reset."""

    reset_every: int = key(0, "Steps from one reset to the next; 0 = never.", ge=0)
    reset_patience: int = key(0, "Evaluations in a row without a new best pass@1 before a reset; 0 = never.", ge=0)
    reset_optimizer: bool = key(False, "Reset the optimizer of the actor as well.")


@section
class OpsConfig:
    """Implementation of the loss and the advantages."""

    implementation: Literal["reference", "fused"] = key(
        "fused", '"fused": the kernels of csrc, which never store the logits. "reference": the plain torch definition.'
    )


@section
class OptimConfig:
    """AdamW of the actor. The critic and `brorl sft` share all but the learning rate."""

    lr: float = key(1e-6, "Learning rate.", ge=0)
    lr_for_rollouts: int = key(
        0,
        "Rollouts per step that lr is meant for. The learning rate is lr times the square root of the rollouts of a "
        "step over this (BroRL, section 4.2.1); 0 = lr itself.",
        ge=0,
    )
    lr_counts: Literal["asked", "kept"] = key(
        "asked",
        'Rollouts of a step that lr_for_rollouts is compared with. "asked": rollout.prompts x rollout.n. "kept": those '
        "that remain after dynamic sampling.",
    )
    warmup_steps: int = key(0, "Linear warm-up, in optimizer steps. Skipped updates do not count.", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate after the warm-up, of actor, critic and `brorl sft`."
    )
    min_lr_ratio: float = key(0.0, 'Floor of "linear" and "cosine", as a share of lr.', ge=0, le=1)
    lr_decay_steps: int = key(
        0,
        'Optimizer steps, warm-up included, after which "linear" and "cosine" reach the floor; 0 = those of the whole '
        "run. `brorl sft` uses sft.steps.",
        ge=0,
    )
    betas: tuple[Beta, Beta] = key((0.9, 0.999), "Decay rates of the two moments.")
    eps: float = key(1e-8, "Added to the denominator.")
    weight_decay: float = key(0.01, "Decoupled weight decay.")
    clip_grad: float = key(1.0, "Largest norm of the gradient; 0 = no clipping.", ge=0)


@section
class TrainConfig:
    """Length of the run, memory, checkpoints and checks."""

    steps: int = key(100, "Training steps, at most.", ge=0)
    max_seconds: float = key(0.0, "Seconds of training steps after which the run ends; 0 = no limit.", ge=0)
    patience: int = key(0, "Evaluations in a row without a new best pass@1 before the run ends; 0 = never.", ge=0)
    tokens_per_micro_batch: int = key(
        0, "Tokens of a micro-batch on a rank, at most; 0 = 2,048 on a CPU, 16,384 on a GPU.", ge=0
    )
    recompute: Literal["none", "attention", "full"] = key(
        "none", "Activations that the backward pass recomputes: those of the core of attention, or all."
    )
    offload: bool = key(False, "Keep weights and optimizer in host memory while the engine generates.")
    share_prompt: bool = key(True, "Let siblings share one copy of their prompt in a micro-batch if that saves 10%.")
    checkpoint_every: int = key(50, "Steps from one checkpoint to the next; 0 = only at the end.", ge=0)
    keep_checkpoints: int = key(2, "Newest checkpoints that are kept.", ge=1)
    keep_best: Literal["", "pass_at_1", "pass_at_k"] = key(
        "",
        "Also keep the checkpoint with the best held-out pass@1, or pass@k of the largest k, as checkpoints/best. The "
        "first of equal ones counts.",
    )
    checkpoint_async: bool = key(
        True, "Write checkpoints in the background, from a copy in host memory. The run waits for the last one."
    )
    resume: Literal["auto", "never"] = key(
        "auto", 'Resume from the newest checkpoint in run.dir ("auto"), or start anew.'
    )
    max_nonfinite_steps: int = key(5, "Consecutive steps that are not finite after which the run ends.", ge=1)
    verify_reshard: Literal["auto", "always", "never"] = key(
        "auto",
        "Compare the log-probabilities of a few sampled tokens between engine and actor after each weight update. "
        '"auto": if engines are processes of their own.',
    )
    verify_tolerance: float = key(
        0.0,
        "Mean difference of an engine, in nats; the 99% quantile may be 4 times, the maximum 10 times as large. 0 = "
        "3e-4 in fp32, 0.3 in bf16, 0.6 with FP8 weights, keys or values.",
        ge=0,
    )


@section
class TheoryConfig:
    """The live mass balance: metrics theory_* (docs/theory.md). They do not influence training."""

    every: int = key(1, "Steps from one measurement to the next; 0 = never.", ge=0)
    prompts: int = key(8, "Prompts of a step that are examined token by token.", ge=1)
    positions: int = key(8, "Positions per prompt at which the whole softmax is computed; 0 = none.", ge=0)


@section
class EvaluateConfig:
    """Evaluation on held-out prompts."""

    every: int = key(0, "Steps from one evaluation to the next; 0 = only before and after the run.", ge=0)
    samples: int = key(8, "Samples per held-out prompt, for pass@k of k = 1, 2, 4, ... up to it.", ge=1)
    benchmarks: tuple[str, ...] = key(
        (), 'Files of `brorl evaluate`, instead of the held-out prompts: "FILE" or "name=FILE".'
    )
    temperature: float = key(0.6, "Sampling temperature; 0 = greedy. 0.6 is that of BroRL, appendix D.", ge=0)
    top_p: float = key(0.95, "As rollout.top_p.", gt=0, le=1)
    top_k: int = key(0, "As rollout.top_k.", ge=0)


@section
class SftConfig:
    """Supervised fine-tuning (`brorl sft`)."""

    steps: int = key(200, "Optimizer steps.", ge=0)
    examples_per_step: int = key(256, "Examples per step, over all ranks.", ge=1)
    lr: float = key(1e-3, "Learning rate.", ge=0)


@section
class Config:
    """All sections."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    ops: OpsConfig = Field(default_factory=OpsConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    theory: TheoryConfig = Field(default_factory=TheoryConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    sft: SftConfig = Field(default_factory=SftConfig)


@functools.cache
def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file."""
    return TypeAdapter(Config).json_schema() | {"title": "brorl"}


@functools.cache
def keys() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every key by its path: "rollout.n", and "data.tasks[].name" in a list of tables."""
    return {path: found for path, found in _walk(json_schema(), "") if "." in path}


def table_of(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the table that a key holds, directly or as items of a list; None if it holds a value."""
    reference = found.get("items", found).get("$ref", "")
    table: dict[str, Any] | None = json_schema()["$defs"].get(reference.rpartition("/")[2])
    return table


def _walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in table["properties"].items():
        yield prefix + name, found
        inner = table_of(found)
        if inner:
            yield from _walk(inner, f"{prefix}{name}{'[]' if 'items' in found else ''}.")
