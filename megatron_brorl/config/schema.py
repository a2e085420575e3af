"""The configuration of a run: frozen sections of typed keys, each with its meaning, default and bound.

The comments above and beside a key are its meaning and unit, for `brorl config` too (config/describe.py). The keys of
[data] are in config/data_keys.py, those of [engine] in config/engine_keys.py, those of [optim] in config/optim_keys.py.
config/load.py reads them; rules over several keys are in config/validate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_brorl.config.bounds import above, at_least, within
from megatron_brorl.config.data_keys import DataConfig
from megatron_brorl.config.engine_keys import EngineConfig
from megatron_brorl.config.optim_keys import OptimConfig


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/default"  # metrics, checkpoints, plots and model/ go here; none of them may replace an input
    seed: int = 0  # the only seed: data order and every random stream derive from it
    started: float = 0.0  # Unix time at which the whole job began, where this command is not its first; 0 = now
    # What run.dir/rollouts holds whole (docs/rollouts.md): the rollouts of so many groups of each step, and at
    # evaluations of all held-out prompts; of each the first siblings, as run.record_tokens allows
    record_groups: int = at_least(0, default=4)
    record_tokens: int = at_least(0, default=1048576)  # that are held whole, per step and per evaluation
    # Licence that the card of the exported model names, as the hub writes it ("apache-2.0"); "" = that of the card of
    # model.path, or "other" where it has none
    license: str = ""
    # Unix time at which a scheduler ends the job: before a step that would not be done by then, `brorl train` saves and
    # leaves with 75. 0 = SLURM_JOB_END_TIME, where there is one
    ends_at: float = at_least(0, default=0.0)
    # Where figures go besides metrics.jsonl, each if it is installed: TensorBoard to run.dir/tensorboard, the others to
    # the project "brorl", or where their own environment variables say (WANDB_PROJECT, MLFLOW_TRACKING_URI)
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    # Write a trace of all ranks, dir/traces/step_000010.json, for each step whose number in metrics.jsonl is a multiple
    # of this; 0 = never
    trace_every: int = at_least(0, default=0)
    # Dense bfloat16 TFLOP/s of a device, over which utilisation is told; 0 = by its name, where it is a known GPU
    peak_tflops: float = at_least(0, default=0.0)


@dataclass(frozen=True)
class ModelConfig:
    # Hugging Face directory (config.json, *.safetensors, tokenizer), or a model's name on the hub (Qwen/Qwen2.5-0.5B)
    path: str = ""
    dtype: Literal["fp32", "bf16"] = "fp32"  # of weights and activations; the optimizer keeps fp32 masters
    # Prompt + response tokens at most; 0 = max_position_embeddings of config.json
    context: int = at_least(0, default=0)


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = at_least(1, default=1)  # ranks that every layer is cut over (tensor parallelism)
    pipeline: int = at_least(1, default=1)  # stages of layers, one behind another (pipeline parallelism)
    context: int = at_least(1, default=1)  # ranks that the tokens of every sequence are cut over (context parallelism)
    sequence: bool = False  # Megatron's sequence parallelism (needs tensor > 1)
    distributed_optimizer: bool = False  # ZeRO-1; a resumed run needs the same tensor and pipeline sizes
    overlap_grad_reduce: bool = False  # gradients are summed over data-parallel ranks while the backward pass goes on
    overlap_param_gather: bool = False  # ZeRO-1's weights are gathered while the next forward pass goes on
    # A collective that waits longer ends the run; ranks that wait for another's rollouts wait rollout.timeout_s more.
    timeout_s: float = above(0, default=600.0)


@dataclass(frozen=True)
class Fp8Config:
    """Training in FP8 by Transformer Engine's layers, on GPUs that have it (models.fp8 checks)."""

    # tensorwise scales by the current maximum, delayed by past ones, blockwise per 128 x 128; mxfp8 needs Blackwell
    recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"
    format: Literal["e4m3", "hybrid"] = "hybrid"  # hybrid: gradients in e5m2
    parameters: bool = False  # the weights of linears are stored in FP8, beside the optimizer's fp32 masters
    bf16_layers: int = at_least(0, default=0)  # at each end of the model that stay in bf16; not with recipe = "delayed"
    amax_history: int = at_least(1, default=1024)  # steps that recipe = "delayed" looks back


@dataclass(frozen=True)
class RolloutConfig:
    n: int = at_least(1, default=512)  # rollouts per prompt
    # Prompts per step, over all ranks. A step may span epochs of data.train, and take more prompts than there are: one
    # that it takes twice is two groups of n, each with its own random numbers and its own baseline.
    prompts: int = at_least(1, default=128)
    # "torch" is built in; the others run in processes of their own (section [engine]).
    engine: Literal["torch", "trtllm", "vllm"] = "torch"
    # What logits are divided by before sampling
    temperature: float = above(0, default=1.0, why=" (sampling needs randomness)")
    top_p: float = within("(0, 1]", default=1.0)  # probability of the likeliest tokens that are sampled from
    top_k: int = at_least(0, default=0)  # how many of the likeliest tokens are sampled from; 0 = off
    max_tokens: int = at_least(1, default=1024)  # tokens of a response, at most
    max_num_seqs: int = at_least(1, default=2048)  # rollouts decoded at a time on one rank
    # Rollouts that wait go to whichever engine has room, and when none waits any more, built-in engines that run out
    # take over some that others have begun. Which ones are decoded together then depends on time, and with it the last
    # bits of an engine's floats: off, runs repeat bit for bit
    pull: bool = False
    # MiB for keys and values on one rank; what does not fit waits. 0 = half of what is free
    kv_cache_mib: int = at_least(0, default=0)
    stop_strings: tuple[str, ...] = ()  # a response ends when its text contains one, besides the model's stop tokens
    dtype: Literal["fp32", "bf16"] = "fp32"  # of the engine's weights, keys and values
    # Seconds of a step's sampling on one rank; rollouts that have not ended half-way are named. Then it is told to
    # stop, and what does not end is lost, or carried to the next step where there are partial rollouts.
    timeout_s: float = above(0, default=1800.0)
    # Share of a step's rollouts that may be lost; the others are trained on. More end the run; 0: any does
    max_lost_share: float = within("[0, 1]", default=0.1)
    # Tokens that one step adds to a response at most; the rest follows in the next steps, and a group is trained on
    # when its last sibling has ended. 0 = responses are sampled whole.
    partial_tokens: int = at_least(0, default=0)
    # Rounds of more prompts that a step samples at most while dynamic sampling keeps fewer than rollout.prompts groups.
    # Kept groups beyond that are trained on in the next step.
    refills: int = at_least(0, default=0)
    # With refills a round asks as many prompts as the share kept of late says will do, at most so many times
    # rollout.prompts. 1: every round asks rollout.prompts
    max_oversample: float = within("[1, 16]", default=4.0)
    # Steps that a group is carried over at most; what has not ended then is lost
    max_carried_steps: int = at_least(0, default=8)


@dataclass(frozen=True)
class RewardConfig:
    workers: int = at_least(1, default=2)  # scoring processes per rank
    # Seconds per answer; a worker that takes longer is killed and the answer scores 0
    timeout_s: float = above(0, default=5.0)
    max_chars: int = at_least(1, default=65536)  # a longer answer scores 0 unseen; some verifiers take less
    # What part of a response is the answer. "verifier": what its row's verifier looks for; the others are for all rows
    extract: Literal["verifier", "full", "answer_tag", "boxed"] = "verifier"
    # Programs that the model writes run in a sandbox; true: where there is none, or not, they run without isolation
    unsandboxed: bool = False
    # The smallest reward of a response that counts as correct: in pass@1, pass@k and every other count of right
    # responses. A response that failed to be scored, or was cut off with cut_off_factor below 1, never does.
    correct_at: float = 1.0
    strict: bool = False  # train on 1 for a correct response and 0 for any other; false: on the verifier's own reward
    # Factor on the reward of a response that rollout.max_tokens cut off ("stop properly"). It never raises a reward: a
    # negative one stays as it is. With 0, verifiers that give no negative rewards do not look at such a response.
    cut_off_factor: float = within("[0, 1]", default=0.0)


@dataclass(frozen=True)
class ShapingConfig:
    """What is added to rewards before advantages are made of them; groups are selected by what was scored."""

    # The last so many tokens below rollout.max_tokens cost up to 1, growing linearly; 0 = off
    overlong_tokens: int = at_least(0, default=0)
    # A correct response of t tokens gets cosine_coef (min + (max - min) (1 + cos(pi t / rollout.max_tokens)) / 2) more,
    # for cosine_on_steps steps, and then not for cosine_off_steps steps, in turn; cosine_off_steps = 0: always.
    cosine_coef: float = 0.0
    cosine_min: float = -0.5  # `min` of cosine_coef: what the longest response gets
    cosine_max: float = 0.0  # `max` of cosine_coef: what the shortest response gets
    cosine_on_steps: int = at_least(0, default=100)  # steps in a row with cosine_coef
    cosine_off_steps: int = at_least(0, default=500)  # steps in a row without it; 0 = never
    # Tokens of an n-gram, each of which costs repetition_penalty where it has occurred before in its response; 0 = off
    repetition_ngram: int = at_least(0, default=0)
    repetition_penalty: float = at_least(0, default=0.001)  # reward that a repeated n-gram costs

    @property
    def is_on(self) -> bool:
        """Whether anything is ever added."""
        return bool(self.overlong_tokens or self.cosine_coef or self.repetition_ngram)


Advantage = Literal["reinforce_pp_baseline", "grpo", "maxrl", "pass_at_k", "gae"]


@dataclass(frozen=True)
class AlgoConfig:
    # "reinforce_pp_baseline": reward minus the mean of its group, whitened over the step's rollouts; "grpo": minus the
    # mean and over the standard deviation of its group; "maxrl": minus the mean and over the mean of its group, which
    # weighs hard prompts more; "pass_at_k": what it adds to pass@k, over what the others have, whitened likewise;
    # "gae": generalised advantages of a critic, whitened over the step's tokens
    advantage: Advantage = "reinforce_pp_baseline"
    pass_k: int = at_least(0, default=0)  # k of advantage = "pass_at_k", below rollout.n; 0 with any other
    gamma: float = within("[0, 1]", default=1.0)  # discount per token of advantage = "gae"
    lam: float = within("[0, 1]", default=1.0)  # lambda of advantage = "gae": 1 trusts the rewards, 0 the critic
    dynamic_sampling: bool = True  # train on groups with different rewards alone; false: on every group
    correct_boost: float = 0.0  # added to the advantages of a correct response (reward.correct_at)
    overlong_filter: bool = False  # no loss on responses that rollout.max_tokens cut off; baselines still count them
    kl_coef: float = at_least(0, default=0.0)  # of the KL to the reference policy; 0 = no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"  # in the loss only k2's gradient is that of KL(pi || reference)
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL to the reference policy counts
    # What the loss makes of a token's importance ratio and advantage: "clip": PPO's clipped surrogate with its bounds
    # apart (DAPO); "cispo": bounds on the importance weight alone, so that no token loses its gradient (MiniMax-M1);
    # "sapo": a smooth gate of the temperatures tau in place of bounds (SAPO)
    policy_loss: Literal["clip", "cispo", "sapo"] = "clip"
    eps_low: float = within("(0, 1)", default=0.2)  # the ratio's lower bound is 1 - eps_low
    eps_high: float = above(0, default=0.28)  # the ratio's upper bound is 1 + eps_high
    dual_clip: float = 0.0  # bound above 1 on the ratio of tokens with negative advantage ("clip" alone); 0 = none
    tau_pos: float = above(0, default=1.0)  # of "sapo": how fast the gate closes where the advantage is above 0
    tau_neg: float = above(0, default=1.05)  # of "sapo": how fast the gate closes elsewhere
    ratio: Literal["token", "sequence"] = "token"  # importance ratio of each token, or one per sequence (GSPO)
    # Truncated importance sampling between engine and trainer; 0 = off. With rollout.top_p or top_k a token's weight is
    # the probability mass that the cut left, which is below 1
    is_cap: float = at_least(0, default=2.0)
    # Tokens, or whole sequences by the geometric mean of theirs, whose pi_old / pi_rollout lies outside
    # [mismatch_low, mismatch_high] get no loss; they still count in its divisor.
    mismatch_mask: Literal["off", "token", "sequence"] = "off"
    mismatch_low: float = at_least(0, default=0.5)  # lower end of mismatch_mask's interval
    mismatch_high: float = 5.0  # upper end of mismatch_mask's interval
    entropy_coef: float = at_least(0, default=0.0)  # bonus for entropy in the loss
    # What the loss is divided by: "token_mean": the tokens of a mini-batch; "sequence_mean": the tokens of each
    # sequence, and then their number; "fixed": aggregation_tokens per sequence
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    aggregation_tokens: int = at_least(0, default=0)  # the divisor per sequence of aggregation = "fixed"
    # "rollout" takes the engine's log-probs, which saves a forward pass where engine == trainer; not with rollout.top_p
    # below 1 or rollout.top_k, over which the engine renormalises
    old_log_probs: Literal["actor", "rollout"] = "actor"
    mini_batches: int = at_least(1, default=1)  # optimizer steps per sampled batch
    mini_batch_of: Literal["prompts", "siblings"] = "prompts"  # each has whole groups, or a part of every group
    epochs: int = at_least(1, default=1)  # times that a step goes over its mini-batches


@dataclass(frozen=True)
class CriticConfig:
    """Of algo.advantage = "gae". Its optimizer's other settings are those of [optim]."""

    lr: float = at_least(0, default=1e-5)  # learning rate of the critic
    lr_warmup_steps: int = at_least(0, default=0)  # linear, in optimizer steps taken by the critic
    # Training steps at the start in which the critic learns and the actor waits. A step without an update of the critic
    # does not count
    warmup_steps: int = at_least(0, default=0)
    # How far a value may move from the old one before its loss is clipped; 0 = no clipping
    clip: float = at_least(0, default=0.2)


@dataclass(frozen=True)
class ReferenceConfig:
    """Of algo.kl_coef. The reference policy is the actor as it was at the start, or at the last reset."""

    reset_every: int = at_least(0, default=0)  # steps; 0 = never
    # Evaluations in a row without a new best held-out pass@1; 0 = never
    reset_patience: int = at_least(0, default=0)
    reset_above_kl: float = at_least(0, default=0.0)  # nats per token that a step's mean KL may reach; 0 = no limit
    reset_optimizer: bool = False  # start the actor's optimizer anew as well


@dataclass(frozen=True)
class OpsConfig:
    # "fused": csrc's kernels, of which the loss never holds the logits; "reference": plain torch that defines them
    implementation: Literal["reference", "fused"] = "fused"


@dataclass(frozen=True)
class TrainConfig:
    steps: int = at_least(0, default=100)  # of training, at most
    # Seconds of training steps, evaluations not counted, after which the run ends; 0 = no limit
    max_seconds: float = at_least(0, default=0.0)
    # Evaluations in a row whose held-out pass@1 is not above the best one by more than min_delta; the run ends then.
    patience: int = at_least(0, default=0)  # 0 = never
    min_delta: float = at_least(0, default=0.0)  # pass@1 that counts as a gain for `patience`
    # Tokens of a micro-batch on one rank, at most. 0 = 2,048 on a CPU, where more only take memory, 16,384 on a GPU.
    tokens_per_micro_batch: int = at_least(0, default=0)
    recompute: bool = False  # recompute activations in the backward pass
    recompute_attention: bool = False  # recompute the core of attention alone
    offload: bool = False  # weights and optimizer wait in host memory while the engine generates
    # Siblings share one copy of their prompt in a micro-batch, where that saves a tenth of the tokens.
    share_prompt: bool = True
    checkpoint_every: int = at_least(0, default=50)  # steps from one checkpoint to the next; 0 = only at the end
    keep_checkpoints: int = at_least(1, default=2)  # the newest ones; older ones are deleted
    # Keep the checkpoint with the best held-out pass@1, or pass@k of the largest k, beside the newest ones, named by
    # checkpoints/best; "" = none. A step whose evaluation is the best so far is saved; of equal ones the first counts.
    keep_best: Literal["", "pass_at_1", "pass_at_k"] = ""
    # Written while the run goes on, from a copy of what each rank writes, for which host memory is kept from the first
    # one on. false: the run waits for it. The last one is always waited for.
    checkpoint_async: bool = True
    resume: Literal["auto", "never"] = "auto"  # "auto": from the newest checkpoint in run.dir; "never": start anew
    # Steps in a row that skip an update (its gradient is not finite), or leave out more rows than they train on (their
    # log-probabilities are not finite), after which the run ends. The state is saved.
    max_nonfinite_steps: int = at_least(1, default=5)
    # After each refit, compare log-probs of a few sampled tokens on engine and actor. "auto": where engines are
    # processes of their own, which a checksum of what they were sent does not see into
    verify_reshard: Literal["auto", "always", "never"] = "auto"
    # Nats that the mean difference of an engine may have; the 99% quantile may have 4 times as much, the maximum 10
    # times. 0 = 3e-4 where both compute in fp32, 0.3 where one computes in bf16, 0.6 where one has weights or keys and
    # values in FP8
    verify_tolerance: float = at_least(0, default=0.0)


@dataclass(frozen=True)
class TheoryConfig:
    """The live mass balance: metrics theory_* (docs/theory.md). They do not influence training."""

    every: int = at_least(0, default=1)  # steps; 0 = never
    prompts: int = at_least(1, default=8)  # trained prompts per step whose tokens are analysed
    positions: int = at_least(0, default=8)  # positions per such prompt with the policy's whole softmax; 0 = none
    max_position: int = at_least(1, default=32)  # positions are among the first tokens of a response


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = at_least(0, default=0)  # steps from one held-out evaluation to the next; 0 = only before and after
    samples: int = at_least(1, default=8)  # per held-out prompt
    pass_at: tuple[int, ...] = ()  # k of pass@k, at most `samples`; () = 1, 2, 4, ... up to it
    # Of `brorl evaluate`, instead of the held-out prompts: "FILE" or "name=FILE", each JSONL or Parquet.
    benchmarks: tuple[str, ...] = ()
    temperature: float = at_least(0, default=0.6)  # as of rollout, 0 = greedy; 0.6 as in BroRL, appendix D
    top_p: float = within("(0, 1]", default=0.95)  # as of rollout
    top_k: int = at_least(0, default=0)  # as of rollout; 0 = off
    bootstrap: int = at_least(1, default=2000)  # resamples of the prompts for the 95% interval


@dataclass(frozen=True)
class SftConfig:
    steps: int = at_least(0, default=200)  # optimizer steps
    examples_per_step: int = at_least(1, default=256)  # over all ranks
    lr: float = at_least(0, default=1e-3)  # learning rate
    warmup_steps: int = at_least(0, default=10)  # of the learning rate, linear, in optimizer steps
    weight_decay: float = 0.01  # decoupled, as in AdamW


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    theory: TheoryConfig = field(default_factory=TheoryConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sft: SftConfig = field(default_factory=SftConfig)
