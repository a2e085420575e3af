"""Keys of other trainers, for the message about an unknown key: our key, and how a value is converted.

A row is "our.key" where the same value means the same here. Else a predicate follows that says the unit and the
conversion: "our.key: counts ...". "none: why" says that there is no such key. A step is one round of sampling and
training here, where TRL's steps are optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping

TRL = {  # trl.GRPOConfig and the arguments of trl.GRPOTrainer
    "num_generations": "rollout.n",
    "per_device_train_batch_size": "rollout.prompts: counts completions per device and micro-batch: rollout.prompts "
    "= per_device_train_batch_size x devices x steps_per_generation / num_generations",
    "generation_batch_size": "rollout.prompts: counts completions: rollout.prompts = generation_batch_size / "
    "num_generations",
    "steps_per_generation": "algo.mini_batches: counts micro-batches: algo.mini_batches = steps_per_generation / "
    "gradient_accumulation_steps",
    "gradient_accumulation_steps": "algo.mini_batches: counts micro-batches per optimizer step: algo.mini_batches = "
    "steps_per_generation / gradient_accumulation_steps; train.tokens_per_micro_batch decides how many micro-batches "
    "there are",
    "num_iterations": "algo.epochs",
    "max_completion_length": "rollout.max_tokens",
    "max_steps": "train.steps: counts optimizer steps: train.steps = max_steps / (algo.mini_batches x algo.epochs)",
    "num_train_epochs": "train.steps: counts passes over the data: train.steps = num_train_epochs x rows of "
    "data.train / rollout.prompts",
    "save_steps": "train.checkpoint_every: counts optimizer steps: train.checkpoint_every = save_steps / "
    "(algo.mini_batches x algo.epochs)",
    "eval_steps": "evaluate.every: counts optimizer steps: evaluate.every = eval_steps / (algo.mini_batches x "
    "algo.epochs)",
    "logging_steps": "none: metrics.jsonl has every step",
    "save_total_limit": "train.keep_checkpoints",
    "num_generations_eval": "evaluate.samples",
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.lr_schedule",
    "lr_scheduler_kwargs": "optim.min_lr_ratio: is a table; optim.min_lr_ratio is its min_lr_rate",
    "min_lr_rate": "optim.min_lr_ratio",
    "warmup_ratio": "optim.warmup_steps: is a share of all optimizer steps: optim.warmup_steps = warmup_ratio x "
    "train.steps x algo.mini_batches x algo.epochs",
    "adam_beta1": "optim.betas: is the first of two numbers: optim.betas = [adam_beta1, adam_beta2]",
    "adam_beta2": "optim.betas: is the second of two numbers: optim.betas = [adam_beta1, adam_beta2]",
    "adam_epsilon": "optim.eps",
    "beta": 'algo.kl_coef: is the same coefficient, of the KL that is algo.kl_estimator = "k3" here',
    "epsilon": "algo.eps_low: is also the default of epsilon_high; here algo.eps_high has its own default, so set both",
    "epsilon_high": "algo.eps_high",
    "delta": "algo.dual_clip",
    "loss_type": 'algo.aggregation: "dapo" is "token_mean" here, "grpo" is "sequence_mean", "dr_grpo" is "fixed" '
    'with algo.aggregation_tokens = max_completion_length; "cispo" and "sapo" are values of algo.policy_loss',
    "sapo_temperature_pos": "algo.tau_pos",
    "sapo_temperature_neg": "algo.tau_neg",
    "importance_sampling_level": "algo.ratio",
    "scale_rewards": 'algo.advantage: "group" (or true) is "grpo" here, "batch" is "reinforce_pp_baseline", "mean" '
    'is "maxrl"; "none" (or false) has no counterpart',
    "mask_truncated_completions": "algo.overlong_filter",
    "vllm_importance_sampling_cap": "algo.is_cap: is the same number where vllm_importance_sampling_mode = "
    '"token_truncate"',
    "reward_funcs": 'data.verifier: are Python functions; here data.verifier = "my_rewards.py:score" names a file '
    "and a function (docs/verifiers.md)",
    "reward_weights": "data.verifier: add the rewards, with their weights, in one function of your own "
    "(docs/verifiers.md)",
    "use_vllm": 'rollout.engine: = true is rollout.engine = "vllm" here, false is "torch"',
    "vllm_mode": "none: a vLLM engine always shares the GPUs of the ranks that train",
    "vllm_gpu_memory_utilization": "engine.memory_fraction",
    "vllm_tensor_parallel_size": "engine.tensor",
    "vllm_max_model_length": "model.context",
    "peft_config": "none: all weights are trained; there are no adapters (LoRA)",
    "bf16": 'model.dtype: = true is model.dtype = "bf16" here, false is "fp32"',
    "gradient_checkpointing": "train.recompute: is the same switch; its default is true, here false",
    "output_dir": "run.dir",
    "report_to": "run.log",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train: is a name on the hub; here data.train is a list of files: "
    '["hf://datasets/OWNER/NAME/FILE"]',
}
VERL = {  # the last part of verl's keys, and the variables of its DAPO scripts
    "n_resp_per_prompt": "rollout.n",
    "train_batch_size": "rollout.prompts",
    "train_prompt_bsz": "rollout.prompts",
    "gen_batch_size": "rollout.max_oversample: counts the prompts sampled at a time: rollout.max_oversample = "
    "gen_batch_size / train_batch_size",
    "max_prompt_length": "model.context: counts the tokens of a prompt: model.context = max_prompt_length + "
    "max_response_length",
    "max_response_length": "rollout.max_tokens",
    "response_length": "rollout.max_tokens",
    "ppo_mini_batch_size": "algo.mini_batches: counts prompts: algo.mini_batches = train_batch_size / "
    "ppo_mini_batch_size",
    "train_prompt_mini_bsz": "algo.mini_batches: counts prompts: algo.mini_batches = train_prompt_bsz / "
    "train_prompt_mini_bsz",
    "ppo_epochs": "algo.epochs",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "train.tokens_per_micro_batch: counts sequences, not tokens: "
    "train.tokens_per_micro_batch = ppo_micro_batch_size_per_gpu x (max_prompt_length + max_response_length)",
    "log_prob_micro_batch_size_per_gpu": "train.tokens_per_micro_batch: counts sequences, not tokens: "
    "train.tokens_per_micro_batch = log_prob_micro_batch_size_per_gpu x (max_prompt_length + max_response_length)",
    "use_dynamic_bsz": "none: micro-batches always hold up to train.tokens_per_micro_batch tokens",
    "adv_estimator": 'algo.advantage: = "reinforce_plus_plus_baseline" is "reinforce_pp_baseline" here, "grpo_passk" '
    'is "pass_at_k"; "grpo" and "gae" keep their names',
    "norm_adv_by_std_in_grpo": 'algo.advantage: = true is algo.advantage = "grpo" here; "reinforce_pp_baseline" '
    "divides by the standard deviation of the whole step",
    "clip_ratio": "algo.eps_low: is the same number on both sides; set algo.eps_high to it too",
    "clip_ratio_low": "algo.eps_low",
    "clip_ratio_high": "algo.eps_high",
    "clip_ratio_c": "algo.dual_clip",
    "loss_agg_mode": 'algo.aggregation: = "token-mean" is "token_mean" here, "seq-mean-token-mean" is '
    '"sequence_mean", "seq-mean-token-sum" is "fixed" with algo.aggregation_tokens = 1',
    "loss_mode": 'algo.policy_loss: = "vanilla" is "clip" here, "gspo" is algo.ratio = "sequence"',
    "use_kl_loss": "algo.kl_coef: = true is algo.kl_coef = kl_loss_coef here, false is 0",
    "kl_loss_coef": "algo.kl_coef",
    "kl_loss_type": 'algo.kl_estimator: = "kl" is "k1" here, "mse" is "k2", "low_var_kl" is "k3"',
    "use_kl_in_reward": 'algo.kl_in: = true is algo.kl_in = "reward" here, with algo.kl_coef = kl_ctrl.kl_coef',
    "entropy_coeff": "algo.entropy_coef",
    "tis_imp_ratio_cap": "algo.is_cap: is the same number, but -1 for off, which is 0 here",
    "filter_groups": "algo.dynamic_sampling: is a table; algo.dynamic_sampling is its enable",
    "max_num_gen_batches": "rollout.refills: counts the first batch too: rollout.refills = max_num_gen_batches - 1",
    "overlong_buffer": "shaping.overlong_tokens: is a table; shaping.overlong_tokens is its len, and penalty_factor "
    "is 1 here",
    "grad_clip": "optim.clip_grad",
    "warmup_style": "optim.lr_schedule",
    "lr_decay_style": "optim.lr_schedule",
    "min_lr": "optim.min_lr_ratio: is a learning rate: optim.min_lr_ratio = min_lr / optim.lr",
    "lr_warmup_steps_ratio": "optim.warmup_steps: is a share of all optimizer steps: optim.warmup_steps = "
    "lr_warmup_steps_ratio x train.steps x algo.mini_batches x algo.epochs",
    "tensor_model_parallel_size": "parallel.tensor: under rollout is engine.tensor here, elsewhere parallel.tensor",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "param_offload": "train.offload: is one switch here with optimizer_offload",
    "optimizer_offload": "train.offload: is one switch here with param_offload",
    "enable_gradient_checkpointing": "train.recompute",
    "gpu_memory_utilization": "engine.memory_fraction",
    "train_files": "data.train",
    "val_files": "data.held_out",
    "prompt_key": "data.columns.prompt",
    "custom_reward_function": 'data.verifier: has path and name; here data.verifier = "path.py:name" is both '
    "(docs/verifiers.md)",
    "lora_rank": "none: all weights are trained; there are no adapters (LoRA)",
    "critic_warmup": "critic.warmup_steps",
    "total_training_steps": "train.steps",
    "total_epochs": "train.steps: counts passes over the data: train.steps = total_epochs x rows of data.train / "
    "rollout.prompts",
    "save_freq": "train.checkpoint_every: is the same number of steps, but -1 for never, which is 0 here",
    "test_freq": "evaluate.every: is the same number of steps, but -1 for never, which is 0 here",
    "max_actor_ckpt_to_keep": "train.keep_checkpoints",
    "n_gpus_per_node": "none: brorl train --processes, torchrun or Slurm say how many ranks there are",
    "default_local_dir": "run.dir",
    "logger": 'run.log: may list "console"; leave that out, the console is always there',
}
NEMO_RL = {  # of NeMo RL's grpo_math_1B.yaml
    "num_generations_per_prompt": "rollout.n",
    "num_prompts_per_step": "rollout.prompts",
    "max_new_tokens": "rollout.max_tokens",
    "max_total_sequence_length": "model.context",
    "train_global_batch_size": "algo.mini_batches: counts responses per optimizer step: algo.mini_batches = "
    "num_prompts_per_step x num_generations_per_prompt / train_global_batch_size",
    "train_micro_batch_size": "train.tokens_per_micro_batch: counts sequences, not tokens: "
    "train.tokens_per_micro_batch = train_micro_batch_size x max_total_sequence_length",
    "train_mb_tokens": "train.tokens_per_micro_batch",
    "normalize_rewards": 'algo.advantage: = true is algo.advantage = "grpo" here; "reinforce_pp_baseline" divides by '
    "the standard deviation of the whole step",
    "use_leave_one_out_baseline": "none: the baseline is the mean of the whole group",
    "ratio_clip_min": "algo.eps_low",
    "ratio_clip_max": "algo.eps_high",
    "ratio_clip_c": "algo.dual_clip",
    "reference_policy_kl_penalty": "algo.kl_coef: is the same coefficient, of the KL that is algo.kl_estimator = "
    '"k3" here',
    "token_level_loss": 'algo.aggregation: = true is "token_mean" here, false is "sequence_mean"',
    "sequence_level_importance_ratios": 'algo.ratio: = true is "sequence" here, false is "token"',
    "overlong_filtering": "algo.overlong_filter",
    "use_dynamic_sampling": "algo.dynamic_sampling",
    "max_grad_norm": "optim.clip_grad",
    "lr_decay_iters": "optim.lr_decay_steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "max_num_steps": "train.steps",
    "max_num_epochs": "train.steps: counts passes over the data: train.steps = max_num_epochs x rows of data.train / "
    "rollout.prompts",
    "val_period": "evaluate.every",
    "save_period": "train.checkpoint_every",
    "keep_top_k": "train.keep_checkpoints: counts the best checkpoints, here the newest; train.keep_best keeps the "
    "best one too",
    "tensor_parallel_size": "parallel.tensor: under vllm_cfg is engine.tensor here, elsewhere parallel.tensor",
    "checkpoint_dir": "run.dir",
    "log_dir": "run.dir",
    "model_name": "model.path",
    "prompt_file": "data.template: is a file; here data.template is the text, with {prompt} where the file has {}",
    "system_prompt_file": "data.system_prompt: is a file; here data.system_prompt is the text",
    "activation_checkpointing": "train.recompute",
}
FOREIGN: Mapping[str, Mapping[str, str]] = {"TRL": TRL, "verl": VERL, "NeMo RL": NEMO_RL}


def known_elsewhere(name: str) -> str:
    """Answer another trainer's key, dotted or not, with ours in one line; "" where no other trainer has it."""
    last = name.split(".")[-1]
    # Names are as good as unique among the trainers: the first table that has one answers.
    for trainer, table in FOREIGN.items():
        if last in table:
            key, _, note = table[last].partition(": ")

            # A key that does not exist here, one of another unit, or one that is only renamed.
            if key == "none":
                return f"{trainer}'s {last} has no counterpart: {note}"
            return f"did you mean {key}? " + (f"{trainer}'s {last} {note}" if note else f"({trainer} calls it {last})")
    return ""
