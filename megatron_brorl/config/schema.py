"""The configuration of a run: frozen pydantic dataclasses, one per section of the TOML file.

A field holds the type, default, bounds and description of a key. `brorl config` prints them, config/load.py reads a
file into these classes, and config/rules.py checks what keys require of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

T = TypeVar("T")
Natural = NonNegativeInt
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CALL_END = "</call>"  # ends a tool call in the plain format
# Names of advantages and policy losses, whose functions are in algo.advantages.ADVANTAGES and
# algo.policy_loss.POLICY_LOSSES. The configuration names a function of a user by its file.
ADVANTAGE_NAMES = {
    "reinforce_pp_baseline": "reward minus the mean of its group, normalised over the step",
    "grpo": "also divided by the standard deviation of the group",
    "rloo": "reward minus the mean of the other rollouts of its group",
    "dr_grpo": "reward minus the mean of its group",
    "maxrl": "also divided by the mean of the group",
    "pass_at_k": "the contribution to pass@k, normalised over the step",
    "gae": "generalised advantage estimation with a critic, normalised over the tokens of the step",
}
BINARY_ADVANTAGES = ("maxrl", "pass_at_k")  # need rewards of 0 and 1
POLICY_LOSS_NAMES = {
    "clip": "the clipped surrogate of PPO with separate bounds (DAPO)",
    "cispo": "bounds only on the importance weight, so that every token keeps its gradient (MiniMax-M1)",
    "sapo": "a smooth gate instead of bounds (SAPO)",
}
# Values are not converted between types, and unknown keys, inf and nan are rejected.
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(cls: type[T]) -> type[T]:
    """Make a class of keys a frozen dataclass that checks its values."""
    made: Any = dataclass(frozen=True, config=_STRICT)(cls)
    return cast("type[T]", made)


def listed(meanings: Mapping[str, str], own: str) -> str:
    """Return the values of a key in words. own: the form of a user's function."""
    known = " ".join(f'"{name}": {meaning}.' for name, meaning in meanings.items())
    return f'{known} "{own}": your own function (docs/extending.md).'


def key(default: Any, description: str, **options: Any) -> Any:
    """Return a field with its default, its description and further options of pydantic's Field."""
    return Field(default, description=description, **options)


@section
class RunConfig:
    """Output folder, seed and logging."""

    dir: str = key("runs/default", "Output folder for metrics, checkpoints, plots and model/. It must hold no input.")
    seed: int = key(0, "Random seed. It determines the order of the data and every random stream.")
    record_groups: Natural = key(
        4, "Groups per step whose texts are stored in run.dir/rollouts. Evaluations store all groups."
    )
    log: tuple[Tracker, ...] = key(
        ("tensorboard",),
        "Trackers that receive the metrics in addition to metrics.jsonl, if they are installed. W&B and MLflow "
        'use the project "brorl" unless WANDB_PROJECT, MLFLOW_TRACKING_URI and similar variables are set.',
    )
    trace_every: Natural = key(0, "Steps between traces of all ranks (traces/step_000010.json). 0 disables tracing.")


@section
class ModelConfig:
    """The model that is trained."""

    path: str = key("", "Hugging Face directory, or the name of a model on the Hugging Face hub (Qwen/Qwen2.5-0.5B).")
    dtype: Literal["fp32", "bf16"] = key("fp32", "Type of weights and activations. The optimizer keeps fp32 weights.")
    context: Natural = key(0, "Maximum tokens of prompt and response. 0 uses max_position_embeddings of config.json.")


@section
class ParallelConfig:
    """Distribution of the training over ranks. The ranks that remain form the data-parallel dimension."""

    tensor: Count = key(1, "Tensor-parallel size: ranks over which each layer is split.")
    pipeline: Count = key(1, "Pipeline-parallel size: stages of consecutive layers.")
    context: Count = key(1, "Context-parallel size: ranks over which the tokens of a sequence are split.")
    expert: Count = key(
        1,
        "Expert-parallel size: ranks over which the experts of a layer are distributed. These are ranks of the data, "
        "context and tensor dimensions; no more are needed.",
    )
    sequence: bool = key(False, "Use Megatron's sequence parallelism. It needs parallel.tensor > 1.")
    distributed_optimizer: bool = key(
        False,
        "Shard the optimizer over data-parallel ranks (ZeRO-1). Resume with equal tensor, pipeline, expert sizes.",
    )
    overlap: bool = key(
        False,
        "Overlap communication with computation: the reduction of gradients with the backward pass and, with the "
        "distributed optimizer, the gathering of weights with the forward pass.",
    )
    timeout_s: PositiveFloat = key(
        600.0, "Timeout of a collective operation in seconds. rollout.timeout_s is added during sampling."
    )


@section
class Fp8Config:
    """Training in FP8 with Transformer Engine, on GPUs that support it."""

    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "none",
        'Scaling recipe. "tensorwise" scales by the current maximum of a tensor, "delayed" by past maxima, and '
        '"blockwise" per block of 128 x 128. "mxfp8" needs a Blackwell GPU. Gradients are stored in e5m2.',
    )
    parameters: bool = key(False, "Store the weights of linear layers in FP8. The optimizer keeps fp32 weights.")
    bf16_layers: Natural = key(0, 'Layers at each end of the model that stay in bf16; 0 with recipe = "delayed".')


@section
class LoraConfig:
    """Low-rank adapters of the actor's linear layers (LoRA), as in PEFT. The model's own weights are frozen."""

    rank: Natural = key(0, "Rank of the adapters. 0 trains all weights without adapters.")
    alpha: PositiveFloat = key(32.0, "The output of an adapter is multiplied by alpha / rank.")
    targets: tuple[Target, ...] = key(
        get_args(Target), "Linear layers with an adapter, by their names in PEFT.", min_length=1
    )


@section
class ColumnsConfig:
    """Columns of files with other column names than this project's. "a.b" is the key b of column a.

    If a column is named here, verifiers and environments receive all columns without a key as row["columns"]. All
    sources of a mixture use the same names.
    """

    prompt: str = key("", 'Column with the prompt: a text or a list of messages. "" means the column "prompt".')
    answer: str = key("", 'Column with the reference answer: a text or a number. "" means the column "answer".')
    answer_regex: str = key(
        "",
        "The answer is the first group of the last match in its column, for example '#### (.+)'. \"\" uses the "
        "whole column.",
    )
    target: str = key("", 'Column with the response that `brorl sft` learns. "" means the column "target".')
    task: str = key("", 'Column with the name under which results are shown. "" means metadata.task.')


@section
class TaskConfig:
    """A reasoning-gym task that generates prompts."""

    name: str = Field(description="Name of the task in reasoning-gym.")
    weight: PositiveFloat = key(1.0, "Share of the prompts, relative to the sum of the weights of all tasks.")
    prompt_regex: str = key("", 'Regular expression whose first group is the prompt. "" uses the whole question.')
    config: dict[str, Any] = Field(default_factory=dict, description="Arguments of reasoning_gym.create_dataset.")


@section
class MixtureConfig:
    """A source of a mixture of files."""

    files: tuple[str, ...] = Field(description="JSONL, JSON, Parquet or CSV files, shuffled in every epoch of it.")
    weight: PositiveFloat = Field(description="Share of the prompts of each step, relative to the sum of all weights.")
    name: str = key("", 'Name of the source in reports. "" uses the name of the first file without its suffix.')
    verifier: str = key("", 'Verifier of rows that do not name one. "" uses data.verifier.')


@section
class DataConfig:
    """Prompts: files, mixtures of files, or generated tasks.

    A file is a JSONL, Parquet or CSV path, or hf://datasets/OWNER/NAME/FILE on the Hugging Face hub.
    """

    train: tuple[str, ...] = key((), "Training files. Their rows are shuffled in every epoch.")
    mixture: tuple[MixtureConfig, ...] = key((), "Sources with a fixed share of every step, instead of data.train.")
    held_out: tuple[str, ...] = key((), "Evaluation files. Their rows are never trained on.")
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    tasks: tuple[TaskConfig, ...] = key((), "Tasks that generate prompts instead of files.")
    held_out_prompts: Count = key(512, "Number of generated held-out prompts. Files are used completely.")
    verifier: str = key(
        "exact",
        'Verifier of rows that name none. "my_rewards.py:score" is a function of your own. "none" scores 0, for runs '
        "with algo.distill_coef or reward.group_function; held-out prompts of data.tasks keep their own verifier.",
    )
    template: str = key("{prompt}", "Text around every prompt, with {prompt} in its place.")
    chat: bool = key(False, "Apply the chat template of the tokenizer. A prompt that is a text becomes a user message.")
    system_prompt: str = key("", "System message that is added to every conversation. It needs data.chat.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, for example {enable_thinking = false}. They need data.chat.",
    )


@section
class RolloutConfig:
    """Sampling of responses."""

    n: Count = key(512, "Rollouts per prompt.")
    prompts: Count = key(128, "Prompts per step over all ranks. A prompt that occurs twice in a step forms two groups.")
    engine: Literal["torch", "trtllm", "vllm"] = key(
        "torch", 'Inference engine: built in ("torch"), or TensorRT-LLM or vLLM in separate processes ([engine]).'
    )
    temperature: PositiveFloat = key(1.0, "Sampling temperature.")
    top_p: PositiveShare = key(1.0, "Sample from the most likely tokens whose probabilities add up to top_p.")
    top_k: Natural = key(0, "Sample from the top_k most likely tokens. 0 samples from all tokens.")
    max_tokens: Count = key(1024, "Maximum number of tokens of a response.")
    max_num_seqs: Count = key(2048, "Maximum number of rollouts that a rank decodes at the same time.")
    pull: bool = key(
        False,
        "Let engines with free capacity take waiting rollouts of other engines (work stealing). Batches then "
        "depend on timing, so runs are no longer bit-exact repeatable.",
    )
    kv_cache_mib: Natural = key(
        0, "Size of the built-in engine's KV cache on each rank in MiB. 0 uses half of a rank's free memory."
    )
    stop_strings: tuple[str, ...] = key((), "Strings that end a response, in addition to the stop tokens of the model.")
    dtype: Literal["fp32", "bf16"] = key("fp32", "Data type of the weights and the KV cache of the engine.")
    replay_routes: Literal["auto", "always", "never"] = key(
        "auto",
        "Train a mixture of experts with the experts that the engine chose for each token (router replay), because "
        'routers that round differently choose different ones. "auto" does so if rollout.dtype differs from '
        "model.dtype, or if the engine is quantized.",
    )
    timeout_s: PositiveFloat = key(
        1800.0,
        "Time limit for sampling in a step, in seconds. Unfinished rollouts are lost, or continue in the next "
        "step with rollout.partial_tokens. In an evaluation, it is the time without a finished sample.",
    )
    max_lost_share: Share = key(0.1, "Maximum fraction of lost rollouts per step before the run aborts.")
    partial_tokens: Natural = key(
        0,
        "Maximum number of tokens that a step adds to a response. Longer responses continue in the next steps, "
        "and a group is trained on when all its rollouts are finished. 0 samples complete responses.",
    )
    refills: Natural = key(
        0,
        "Maximum number of additional sampling rounds per step while dynamic sampling has kept fewer than "
        "rollout.prompts groups. Surplus groups are trained on in the next step.",
    )


@section
class EnvironmentConfig:
    """A rollout of several turns: the model calls tools, or answers observations of an environment.

    Tool calls have the format of the chat template with data.chat, and else a plain format with tags.
    """

    factory: str = key(
        "",
        'Class of the environment, "my_env.py:Calculator" or "package.module:Calculator". Each rollout has an object '
        'of it, which also gives the reward. "" samples single turns, which verifiers score.',
    )
    max_turns: Count = key(8, "Maximum number of turns of the model.")
    max_tool_seconds: PositiveFloat = key(
        10.0, "Seconds that a call of an environment may take. After that, its rollout is lost."
    )


@section
class AgentConfig:
    """A rollout is a run of a function of yours, which calls the policy through an OpenAI-compatible endpoint."""

    function: str = key(
        "",
        'Function that solves a row, "my_agent.py:solve" or "package.module:solve". Each rollout is a call of it. "" '
        "samples responses or environments.",
    )
    history: Literal["keep", "template"] = key(
        "keep",
        '"keep": if the messages of a call begin with those of an earlier call and its reply, the earlier tokens are '
        'kept and the new messages appended. "template": this is done only if the chat template, which may drop '
        "thoughts of earlier turns, gives the same tokens.",
    )
    max_calls: Count = key(64, "Maximum number of calls of a rollout.")
    max_tokens: Natural = key(0, "Maximum number of sampled tokens of a rollout. 0 limits only each call.")
    max_seconds: PositiveFloat = key(300.0, "Seconds that a rollout may take. After that, it scores 0.")


@section
class EngineConfig:
    """The engine processes of rollout.engine = "vllm" or "trtllm". The built-in engine has no such process."""

    python: str = key("", 'Python interpreter of the engine\'s environment. "" uses that of the trainer.')
    tensor: Count = key(1, "Tensor-parallel size. That many consecutive ranks of a node share one engine.")
    memory_fraction: Fraction = key(
        0.85, "KV cache as a fraction of the GPU memory that trainer, engine weights, CUDA contexts and graphs leave."
    )
    kv_dtype: Literal["auto", "fp8"] = key("auto", 'Data type of the KV cache. "auto" uses rollout.dtype.')
    quantization: Literal["none", "fp8"] = key(
        "none",
        "Quantization of the engine's weights. vLLM quantizes the weights that it receives. TensorRT-LLM receives"
        " FP8 weights with one scale per block of 128 x 128.",
    )
    cuda_graphs: bool = key(True, "Use CUDA graphs (and compilation in vLLM) on a GPU.")
    shared_memory: str = key("/dev/shm", "Folder in shared memory for weights: a copy per node, two during an update.")


@section
class RewardConfig:
    """Scoring of responses."""

    workers: Count = key(2, "Processes per rank that score responses, and as many for environments or agents.")
    timeout_s: PositiveFloat = key(5.0, "Seconds per answer. After that, its worker is killed and the reward is 0.")
    extract: Literal["verifier", "full", "answer_tag", "boxed"] = key(
        "verifier", 'How the answer is extracted from a response. "verifier" uses the method of the row\'s verifier.'
    )
    unsandboxed: bool = key(False, "Run programs of the model without isolation if there is no sandbox.")
    correct_at: float = key(
        1.0,
        "Minimum reward of a correct response, for pass@k and all other counts. A response without a score, or "
        "one that was cut off while cut_off_factor is below 1, is never correct.",
    )
    group_function: str = key(
        "",
        'Function that scores all responses to a prompt together, "my.py:score" (docs/verifiers.md), or "majority": 1 '
        'for the most frequent answer. Verifiers still decide what is correct. "" trains on the scores of verifiers.',
    )
    majority_share: Share = key(0.0, 'Minimum share of "majority", below which a group has no signal.')
    strict: bool = key(False, "Train on 1 for a correct response and 0 for any other instead of the verifier's reward.")
    cut_off_factor: Share = key(
        0.0, "Factor for the reward of a response that rollout.max_tokens cut off. Negative rewards are not changed."
    )


@section
class ShapingConfig:
    """Terms that are added to rewards before advantages are computed. Groups are selected by the unshaped rewards."""

    overlong_tokens: Natural = key(
        0, "Tokens below rollout.max_tokens over which a length penalty grows linearly from 0 to 1. 0 disables it."
    )
    cosine_coef: float = key(
        0.0,
        "Coefficient of ProRLv2's length reward, which is added in the first 100 of every 600 steps: (cos(pi t / "
        "rollout.max_tokens) - 1) / 4 for a correct response with t tokens.",
    )
    repetition_ngram: Natural = key(
        0, "Length of n-grams in tokens. Each repetition of one costs a reward of 0.001. 0 disables it."
    )

    @property
    def is_on(self) -> bool:
        """Return whether any term is added."""
        return bool(self.overlong_tokens or self.cosine_coef or self.repetition_ngram)


@section
class AlgoConfig:
    """Advantages and the policy loss."""

    advantage: str = key(
        "reinforce_pp_baseline",
        f"Advantage estimator. {listed(ADVANTAGE_NAMES, 'my_algo.py:advantage')}",
        examples=list(ADVANTAGE_NAMES),
    )
    pass_k: Natural = key(0, 'The k of advantage = "pass_at_k", below rollout.n; 0 otherwise.')
    gamma: Share = key(1.0, 'Discount factor per token of advantage = "gae".')
    lam: Share = key(1.0, 'Lambda of advantage = "gae": 1 uses only the rewards, 0 only the critic.')
    dynamic_sampling: bool = key(True, "Train only on groups with different rewards.")
    train_on: Natural = key(0, "Rollouts of a group in an update: those whose rewards vary most. 0 uses all.")
    overlong_filter: bool = key(False, "Exclude cut-off responses from the loss, but not from the baselines.")
    kl_coef: NonNegativeFloat = key(0.0, "Coefficient of the KL divergence from the reference policy. 0 disables it.")
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "k2", "Estimator of the KL divergence. In the loss, only k2 has the gradient of KL(pi || reference)."
    )
    kl_in: Literal["loss", "reward"] = key("loss", "Add the KL divergence to the loss, or subtract it from the reward.")
    distill_coef: NonNegativeFloat = key(
        0.0,
        "Coefficient of on-policy distillation. This times log pi_teacher - log pi of each sampled token is added to "
        "the token's advantage after normalisation. 0 disables it.",
    )
    policy_loss: str = key(
        "clip", f"Policy loss. {listed(POLICY_LOSS_NAMES, 'my_algo.py:loss')}", examples=list(POLICY_LOSS_NAMES)
    )
    eps_low: Fraction = key(0.2, "The ratio is clipped below at 1 - eps_low.")
    eps_high: PositiveFloat = key(0.28, "The ratio is clipped above at 1 + eps_high.")
    dual_clip: float = key(0.0, 'Upper bound of the ratio for negative advantages, with "clip". 0 disables it.')
    ratio: Literal["token", "sequence"] = key("token", "Use importance ratios per token, or per sequence (GSPO).")
    is_cap: NonNegativeFloat = key(
        2.0,
        "Cap of truncated importance sampling between engine and trainer. 0 disables it. With rollout.top_p or "
        "top_k, the weight accounts for the probability that sampling removed.",
    )
    mismatch_mask: Literal["off", "token", "sequence"] = key(
        "off",
        "Exclude tokens (or sequences, by the geometric mean of their tokens) from the loss if pi_old / "
        "pi_rollout is below 0.5 or above 5. They still count in the divisor of the loss.",
    )
    entropy_coef: NonNegativeFloat = key(0.0, "Coefficient of the entropy bonus in the loss.")
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = key(
        "token_mean",
        'Divisor of the loss. "token_mean": the tokens of the mini-batch. "sequence_mean": the tokens of each '
        'sequence, then the sequences. "fixed": aggregation_tokens per sequence (Dr. GRPO).',
    )
    aggregation_tokens: Natural = key(0, 'Divisor per sequence of aggregation = "fixed".')
    old_log_probs: Literal["actor", "rollout"] = key(
        "actor",
        'Source of the old log-probabilities. "rollout" uses those of the engine, which saves a forward pass if '
        "engine and trainer agree. It needs rollout.top_p = 1 and rollout.top_k = 0.",
    )
    mini_batches: Count = key(1, "Mini-batches, each with one optimizer step, per epoch of a step.")
    mini_batch_of: Literal["prompts", "siblings"] = key(
        "prompts", 'Content of a mini-batch: whole groups ("prompts"), or a part of every group ("siblings").'
    )
    epochs: Count = key(1, "Number of passes over the mini-batches of a step.")


@section
class CriticConfig:
    """The critic of algo.advantage = "gae". Its optimizer uses the other settings of [optim]."""

    lr: NonNegativeFloat = key(1e-5, "Learning rate of the critic.")
    warmup_steps: Natural = key(0, "First steps, which train only the critic. Steps without an update do not count.")
    clip: NonNegativeFloat = key(0.2, "Clip range of the value loss around the old values. 0 disables clipping.")


@section
class ReferenceConfig:
    """Resets of the reference policy of algo.kl_coef, which is the actor at the start or at the last reset."""

    reset_every: Natural = key(0, "Number of steps between resets. 0 disables them.")
    reset_patience: Natural = key(0, "Consecutive evaluations without a new best pass@1 before a reset. 0 disables it.")


@section
class TeacherConfig:
    """The teacher of on-policy distillation (algo.distill_coef). Checkpoints do not contain it."""

    path: str = key(
        "",
        "Hugging Face directory, or the name of a model on the hub. Its tokenizer must be that of model.path; its size "
        'may differ. "" means no teacher.',
    )


@section
class OpsConfig:
    """Implementation of the loss and the advantages."""

    implementation: Literal["reference", "fused"] = key(
        "fused", '"fused" uses the kernels of csrc, which never store the logits. "reference" uses plain torch.'
    )


@section
class OptimConfig:
    """AdamW of the actor. The critic has its own learning rate, `brorl sft` also its own warm-up and weight decay."""

    lr: NonNegativeFloat = key(1e-6, "Learning rate.")
    lr_for_rollouts: Natural = key(
        0,
        "Number of trained rollouts per step for which lr was chosen. The learning rate is lr multiplied by the square "
        "root of the rollouts that a step trains on over this number (BroRL, section 4.2.1). 0 uses lr unchanged.",
    )
    warmup_steps: Natural = key(0, "Linear warm-up in optimizer steps. Skipped updates do not count.")
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning-rate schedule from the warm-up to the end of the run, for actor, critic and `brorl sft`."
    )
    min_lr_ratio: Share = key(0.0, 'Final learning rate of "linear" and "cosine" as a fraction of lr.')
    betas: tuple[Beta, Beta] = key((0.9, 0.999), "Decay rates of the two moment estimates.")
    eps: float = key(1e-8, "Constant that is added to the denominator of the update.")
    weight_decay: float = key(0.01, "Coefficient of the decoupled weight decay.")
    clip_grad: NonNegativeFloat = key(1.0, "Maximum norm of the gradient. 0 disables clipping.")


@section
class TrainConfig:
    """Length of the run, memory, checkpoints and checks."""

    steps: Natural = key(100, "Maximum number of training steps.")
    max_seconds: NonNegativeFloat = key(
        0.0, "Seconds of training steps after which the run ends. 0 sets no limit. Ends refills, too."
    )
    patience: Natural = key(0, "Consecutive evaluations without a new best pass@1 before the run ends. 0 disables it.")
    tokens_per_micro_batch: Natural = key(
        0, "Maximum number of tokens of a micro-batch on a rank. 0 uses 2,048 on a CPU and 16,384 on a GPU."
    )
    recompute: Literal["none", "attention", "full"] = key(
        "none", "Activations that are recomputed in the backward pass: none, those of the attention core, or all."
    )
    offload: bool = key(False, "Move weights and optimizer state to host memory while the engine generates.")
    freeze_router: bool = key(False, "Do not train the routers of a mixture of experts.")
    share_prompt: bool = key(True, "Share a copy of a group's prompt in a micro-batch if this saves 10% of its tokens.")
    checkpoint_every: Natural = key(50, "Number of steps between checkpoints. 0 saves only at the end of the run.")
    keep_checkpoints: Count = key(2, "Number of the newest checkpoints that are kept.")
    keep_best: Literal["", "pass_at_1", "pass_at_k"] = key(
        "",
        "Also keep the checkpoint with the best held-out pass@1, or pass@k for the largest k, as "
        "checkpoints/best. Of equal results, the first is kept.",
    )
    verify_weights: Literal["auto", "always", "never"] = key(
        "auto",
        "Compare the log-probabilities of a few sampled tokens between engine and actor after each weight update."
        ' "auto" does so if the engines are separate processes.',
    )
    verify_tolerance: NonNegativeFloat = key(
        0.0,
        "Largest mean difference, in nats, between an engine's and the actor's log-probabilities of the tokens of"
        " verify_weights. The 99% quantile may be 4 times and the maximum 10 times as large. 0 uses 3e-4 in fp32,"
        " 0.15 in bf16 (0.2 with TensorRT-LLM, 0.3 with experts), and 0.6 with"
        " FP8 weights or an FP8 KV cache.",
    )


@section
class TheoryConfig:
    """Metrics theory_* (docs/theory.md), which do not influence training.

    They estimate the probability of the tokens and answers that no rollout of a group sampled, and how a training step
    changes the mean reward through sampled and unsampled tokens.
    """

    every: Natural = key(1, "Number of steps between measurements. 0 disables them.")


@section
class EvaluateConfig:
    """Evaluation on held-out prompts."""

    every: Natural = key(0, "Number of steps between evaluations. 0 evaluates only before and after the run.")
    samples: Count = key(8, "Samples per held-out prompt. pass@k is computed for k = 1, 2, 4, ... up to this.")
    benchmarks: tuple[str, ...] = key(
        (), 'Files that `brorl evaluate` uses instead of the held-out prompts: "FILE" or "name=FILE".'
    )
    temperature: NonNegativeFloat = key(0.6, "Sampling temperature as in BroRL, appendix D. 0 is greedy decoding.")
    top_p: PositiveShare = key(0.95, "Sample from the most likely tokens whose probabilities add up to top_p.")


@section
class SftConfig:
    """Supervised fine-tuning (`brorl sft`)."""

    steps: Natural = key(200, "Number of optimizer steps.")
    examples_per_step: Count = key(256, "Number of examples per step over all ranks.")
    lr: NonNegativeFloat = key(1e-3, "Learning rate.")


@section
class Config:
    """All sections."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    shaping: ShapingConfig = Field(default_factory=ShapingConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    ops: OpsConfig = Field(default_factory=OpsConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    theory: TheoryConfig = Field(default_factory=TheoryConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    sft: SftConfig = Field(default_factory=SftConfig)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the strings that end a response, or a turn of it."""
        ends_calls = self.environment.factory and not self.data.chat
        return (*self.rollout.stop_strings, *([CALL_END] if ends_calls else []))
