"""Keys of TRL (GRPOConfig), verl, NeMo RL and version 0.2.0, for the message about an unknown key.

Each table maps a key of another program to the answer. Only the end of the key is stored. It has several parts if its
last part has several meanings, or is also a key of this project. The answer is the key of this project, with the
conversion in parentheses if the value has another meaning here. It is "none: " and the reason if there is no such key.
A step is one round of sampling and training. A step of TRL is an optimizer step.
"""

from __future__ import annotations

from collections.abc import Container

_STEPS = "{} / (algo.mini_batches x algo.epochs)"  # {}: the key of the other program
_PASSES = "train.steps ({} x rows of data.train / rollout.prompts)"
_TOKENS = "train.tokens_per_micro_batch ({} x model.context)"
_WARMUP = "optim.warmup_steps ({} x train.steps x algo.mini_batches x algo.epochs)"
_GROUP_STD = 'algo.advantage (true = "grpo", false = "dr_grpo"; "reinforce_pp_baseline" uses the deviation of the step)'
_TIS = 'algo.is_cap (of vllm_importance_sampling_mode = "token_truncate"; algo.mismatch_mask is a mask)'
_LORA = "lora.rank (and lora.alpha for lora_alpha)"


def _renamed(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


def _removed(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"none: {reason} (CHANGELOG.md)")


FOREIGN_KEYS = {
    "TRL": {
        **_renamed("""
            num_generations=rollout.n num_iterations=algo.epochs max_completion_length=rollout.max_tokens
            save_total_limit=train.keep_checkpoints learning_rate=optim.lr lr_scheduler_type=optim.lr_schedule
            epsilon_high=algo.eps_high delta=algo.dual_clip importance_sampling_level=algo.ratio
            mask_truncated_completions=algo.overlong_filter vllm_gpu_memory_utilization=engine.memory_fraction
            vllm_tensor_parallel_size=engine.tensor vllm_max_model_length=model.context output_dir=run.dir
            report_to=run.log log_completions=run.record_groups model_name_or_path=model.path train_dataset=data.train
        """),
        "per_device_train_batch_size": "rollout.prompts (per_device_train_batch_size x devices x "
        "steps_per_generation / num_generations)",
        "steps_per_generation": "algo.mini_batches (steps_per_generation / gradient_accumulation_steps)",
        "gradient_accumulation_steps": "algo.mini_batches (steps_per_generation / gradient_accumulation_steps)",
        "max_steps": f"train.steps ({_STEPS.format('max_steps')})",
        "num_train_epochs": _PASSES.format("num_train_epochs"),
        "save_steps": f"train.checkpoint_every ({_STEPS.format('save_steps')})",
        "eval_steps": f"evaluate.every ({_STEPS.format('eval_steps')})",
        "warmup_ratio": _WARMUP.format("warmup_ratio"),
        "beta": 'algo.kl_coef (with algo.kl_estimator = "k3")',
        "epsilon": "algo.eps_low (set algo.eps_high too)",
        "loss_type": 'algo.aggregation ("dapo" = "token_mean", "grpo" = "sequence_mean", "dr_grpo" = "fixed"; "cispo" '
        'and "sapo" are values of algo.policy_loss)',
        "scale_rewards": 'algo.advantage ("group" = "grpo", "batch" = "reinforce_pp_baseline", "none" = "dr_grpo")',
        "vllm_importance_sampling_cap": _TIS,
        "vllm_importance_sampling_clip_max": _TIS,
        "reward_funcs": 'data.verifier ("my_rewards.py:score" is a file and a function)',
        "use_vllm": 'rollout.engine (true = "vllm", false = "torch")',
        "peft_config": _LORA,
        "bf16": 'model.dtype (true = "bf16", false = "fp32")',
        "gradient_checkpointing": 'train.recompute (true = "full")',
        "logging_steps": "none: every step is logged",
        "dataset_name": 'data.train (a list of files: ["hf://datasets/OWNER/NAME/FILE"])',
    },
    # Also variables of the DAPO scripts. A key that ends with one of this project, such as rollout.n, needs no entry.
    "verl": {
        **_renamed("""
            rollout.name=rollout.engine n_resp_per_prompt=rollout.n train_batch_size=rollout.prompts
            max_response_length=rollout.max_tokens ppo_epochs=algo.epochs
            ppo_max_token_len_per_gpu=train.tokens_per_micro_batch clip_ratio_low=algo.eps_low
            clip_ratio_high=algo.eps_high clip_ratio_c=algo.dual_clip kl_loss_coef=algo.kl_coef
            entropy_coeff=algo.entropy_coef grad_clip=optim.clip_grad critic.optim.lr=critic.lr
            lr_decay_style=optim.lr_schedule tensor_model_parallel_size=parallel.tensor
            rollout.tensor_model_parallel_size=engine.tensor pipeline_model_parallel_size=parallel.pipeline
            context_parallel_size=parallel.context expert_model_parallel_size=parallel.expert
            param_offload=train.offload gpu_memory_utilization=engine.memory_fraction train_files=data.train
            val_files=data.held_out lora_alpha=lora.alpha default_local_dir=run.dir total_training_steps=train.steps
        """),
        "max_prompt_length": "model.context (max_prompt_length + max_response_length)",
        "ppo_mini_batch_size": "algo.mini_batches (train_batch_size / ppo_mini_batch_size)",
        "ppo_micro_batch_size_per_gpu": _TOKENS.format("ppo_micro_batch_size_per_gpu"),
        "use_dynamic_bsz": "none: micro-batches always hold up to train.tokens_per_micro_batch tokens",
        "adv_estimator": 'algo.advantage ("reinforce_plus_plus_baseline" = "reinforce_pp_baseline", "grpo_passk" = '
        '"pass_at_k")',
        "norm_adv_by_std_in_grpo": _GROUP_STD,
        "clip_ratio": "algo.eps_low (set algo.eps_high too)",
        "loss_agg_mode": 'algo.aggregation ("token-mean" = "token_mean", "seq-mean-token-mean" = "sequence_mean")',
        "loss_mode": 'algo.policy_loss ("vanilla" = "clip"; "gspo" is algo.ratio = "sequence")',
        "use_kl_loss": "algo.kl_coef (true = kl_loss_coef, false = 0)",
        "kl_loss_type": 'algo.kl_estimator ("kl" = "k1", "mse" = "k2", "low_var_kl" = "k3")',
        "use_kl_in_reward": 'algo.kl_in (true = "reward")',
        "rollout_is": 'algo.is_cap ("token" = rollout_is_threshold, null = 0)',
        "rollout_is_threshold": 'algo.is_cap (of rollout_is = "token")',
        "filter_groups": "algo.dynamic_sampling (its enable)",
        "max_num_gen_batches": "rollout.refills (max_num_gen_batches - 1)",
        "lr_warmup_steps_ratio": _WARMUP.format("lr_warmup_steps_ratio"),
        "enable_gradient_checkpointing": 'train.recompute (true = "full")',
        "custom_reward_function": 'data.verifier ("path.py:name")',
        "lora_rank": _LORA,
        "n_gpus_per_node": "none: start a rank per GPU, with --processes, torchrun or Slurm",
        "total_epochs": _PASSES.format("total_epochs"),
        "save_freq": "train.checkpoint_every (-1 = 0, which saves at the end)",
        "test_freq": "evaluate.every (-1 = 0, which evaluates before and after the run)",
        "logger": 'run.log (without "console", which is always there)',
    },
    "NeMo RL": {
        **_renamed("""
            num_generations_per_prompt=rollout.n num_prompts_per_step=rollout.prompts
            max_new_tokens=rollout.max_tokens generation.temperature=rollout.temperature
            generation.top_p=rollout.top_p generation.top_k=rollout.top_k generation.backend=rollout.engine
            max_total_sequence_length=model.context ratio_clip_min=algo.eps_low ratio_clip_max=algo.eps_high
            ratio_clip_c=algo.dual_clip truncated_importance_sampling_ratio=algo.is_cap
            reference_policy_kl_type=algo.kl_estimator overlong_filtering=algo.overlong_filter
            use_dynamic_sampling=algo.dynamic_sampling optimizer.kwargs.lr=optim.lr lora_cfg.dim=lora.rank
            lora_cfg.alpha=lora.alpha train_mb_tokens=train.tokens_per_micro_batch max_grad_norm=optim.clip_grad
            max_num_steps=train.steps val_period=evaluate.every save_period=train.checkpoint_every
            tensor_parallel_size=parallel.tensor vllm_cfg.tensor_parallel_size=engine.tensor checkpoint_dir=run.dir
            model_name=model.path
        """),
        "env": 'data.verifier ("my_rewards.py:score" is a file and a function)',
        "train_global_batch_size": "algo.mini_batches (num_prompts_per_step x num_generations_per_prompt / "
        "train_global_batch_size)",
        "normalize_rewards": _GROUP_STD,
        "use_leave_one_out_baseline": 'algo.advantage (true = "rloo")',
        "use_cispo": 'algo.policy_loss (true = "cispo", false = "clip")',
        "sequence_level_importance_ratios": 'algo.ratio (true = "sequence")',
        "reference_policy_kl_penalty": 'algo.kl_coef (with algo.kl_estimator = "k3")',
        "token_level_loss": 'algo.aggregation (true = "token_mean", false = "sequence_mean")',
        "dynamic_sampling_max_gen_batches": "rollout.refills (dynamic_sampling_max_gen_batches - 1)",
        "activation_checkpointing": 'train.recompute (true = "full")',
        "max_num_epochs": _PASSES.format("max_num_epochs"),
    },
    "version 0.2.0": {
        **_renamed("""
            train.verify_reshard=train.verify_weights environment.workers=reward.workers
            critic.lr_warmup_steps=optim.warmup_steps
        """),
        **_removed(
            """
            shaping.cosine_min shaping.cosine_max shaping.cosine_on_steps shaping.cosine_off_steps
            shaping.repetition_penalty algo.mismatch_bounds rollout.max_carried_steps theory.prompts theory.positions
            engine.start_timeout_s engine.heartbeat_timeout_s engine.max_restarts engine.max_num_tokens reward.max_chars
            train.max_nonfinite_steps train.checkpoint_async evaluate.top_k data.train_seed fp8.format
            """,
            "its value is fixed now",
        ),
        **_removed(
            """
            algo.correct_boost reference.reset_optimizer train.resume optim.lr_counts optim.lr_decay_steps
            environment.max_turn_tokens data.columns.id data.columns.verifier data.columns.metadata
            """,
            "it was removed",
        ),
    },
}


def foreign_key_hint(path: str, ours: Container[str] = ()) -> str:
    """Return a hint for a key of another trainer; "" if no trainer above has such a key.

    ours: the keys of this project. A longer key that ends with one of them has the same meaning.
    """
    parts = path.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    meaning = next((table[end] for end in ends for table in FOREIGN_KEYS.values() if end in table), "")
    meaning = meaning or next((end for end in ends[1:] if end in ours), "")
    if meaning.startswith("none: "):
        return f"there is no such key here: {meaning.removeprefix('none: ')}"
    return meaning and f"this trainer calls it {meaning}"
