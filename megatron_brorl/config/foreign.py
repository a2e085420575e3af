"""What other trainers call our keys, for those who come from them: told in the message about an unknown key."""

from __future__ import annotations

from collections.abc import Mapping

TRL = {  # trl.GRPOConfig
    "num_generations": "rollout.n",
    "per_device_train_batch_size": "rollout.prompts",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "model.context",
    "num_iterations": "algo.epochs",
    "steps_per_generation": "algo.mini_batches",
    "gradient_accumulation_steps": "train.tokens_per_micro_batch",
    "learning_rate": "optim.lr",
    "adam_epsilon": "optim.eps",
    "beta": "algo.kl_coef",
    "epsilon": "algo.eps_low",
    "epsilon_high": "algo.eps_high",
    "delta": "algo.dual_clip",
    "loss_type": "algo.aggregation",
    "importance_sampling_level": "algo.ratio",
    "mask_truncated_completions": "algo.overlong_filter",
    "vllm_importance_sampling_cap": "algo.is_cap",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "save_steps": "train.checkpoint_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "evaluate.every",
    "output_dir": "run.dir",
    "report_to": "run.log",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "gradient_checkpointing": "train.recompute",
}
VERL = {  # the last part of verl's keys, and the variables of its DAPO scripts
    "n_resp_per_prompt": "rollout.n",
    "train_batch_size": "rollout.prompts",
    "train_prompt_bsz": "rollout.prompts",
    "gen_batch_size": "rollout.prompts",
    "max_response_length": "rollout.max_tokens",
    "response_length": "rollout.max_tokens",
    "ppo_mini_batch_size": "algo.mini_batches",
    "train_prompt_mini_bsz": "algo.mini_batches",
    "ppo_epochs": "algo.epochs",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "train.tokens_per_micro_batch",
    "adv_estimator": "algo.advantage",
    "clip_ratio_low": "algo.eps_low",
    "clip_ratio_high": "algo.eps_high",
    "clip_ratio_c": "algo.dual_clip",
    "loss_agg_mode": "algo.aggregation",
    "loss_mode": "algo.policy_loss",
    "kl_loss_coef": "algo.kl_coef",
    "kl_loss_type": "algo.kl_estimator",
    "use_kl_in_reward": "algo.kl_in",
    "entropy_coeff": "algo.entropy_coef",
    "tis_imp_ratio_cap": "algo.is_cap",
    "filter_groups": "algo.dynamic_sampling",
    "max_num_gen_batches": "rollout.refills",
    "overlong_buffer": "shaping.overlong_tokens",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "enable_gradient_checkpointing": "train.recompute",
    "train_files": "data.train",
    "val_files": "data.held_out",
    "prompt_key": "data.columns",
    "total_training_steps": "train.steps",
    "total_epochs": "train.steps",
    "save_freq": "train.checkpoint_every",
    "test_freq": "evaluate.every",
    "default_local_dir": "run.dir",
    "logger": "run.log",
}
NEMO_RL = {  # of NeMo RL's grpo_math_1B.yaml
    "num_generations_per_prompt": "rollout.n",
    "num_prompts_per_step": "rollout.prompts",
    "max_new_tokens": "rollout.max_tokens",
    "max_total_sequence_length": "model.context",
    "train_global_batch_size": "algo.mini_batches",
    "train_micro_batch_size": "train.tokens_per_micro_batch",
    "train_mb_tokens": "train.tokens_per_micro_batch",
    "ratio_clip_min": "algo.eps_low",
    "ratio_clip_max": "algo.eps_high",
    "ratio_clip_c": "algo.dual_clip",
    "reference_policy_kl_penalty": "algo.kl_coef",
    "token_level_loss": "algo.aggregation",
    "sequence_level_importance_ratios": "algo.ratio",
    "overlong_filtering": "algo.overlong_filter",
    "use_dynamic_sampling": "algo.dynamic_sampling",
    "max_grad_norm": "optim.clip_grad",
    "max_num_steps": "train.steps",
    "val_period": "evaluate.every",
    "save_period": "train.checkpoint_every",
    "checkpoint_dir": "run.dir",
    "log_dir": "run.dir",
    "model_name": "model.path",
    "prompt_file": "data.template",
    "system_prompt_file": "data.system_prompt",
    "activation_checkpointing": "train.recompute",
}
# Learning-rate schedules.
TRL |= {"lr_scheduler_type": "optim.lr_schedule", "lr_scheduler_kwargs": "optim.min_lr_ratio"}
TRL |= {"min_lr_rate": "optim.min_lr_ratio", "warmup_ratio": "optim.warmup_steps"}
VERL |= {"warmup_style": "optim.lr_schedule", "lr_decay_style": "optim.lr_schedule", "min_lr": "optim.min_lr_ratio"}
VERL |= {"lr_warmup_steps_ratio": "optim.warmup_steps"}
NEMO_RL |= {"lr_decay_iters": "optim.lr_decay_steps", "lr_warmup_iters": "optim.warmup_steps"}
FOREIGN: Mapping[str, Mapping[str, str]] = {"TRL": TRL, "verl": VERL, "NeMo RL": NEMO_RL}


def known_elsewhere(name: str) -> tuple[str, str] | None:
    """(trainer, our key) of another trainer's name, dotted or not; None where none has it."""
    last = name.split(".")[-1]
    return next(((trainer, table[last]) for trainer, table in FOREIGN.items() if last in table), None)
