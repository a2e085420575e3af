"""Every key of the configuration and where it is seen to act. A new key is one line here."""

from __future__ import annotations

from keys import built, engines, judged, steps
from keys.case import Case

GAE = {"algo.advantage": "gae"}
KL = {"algo.kl_coef": 0.1}
REFERENCE = {**KL, "train.steps": 3, "evaluate.every": 1}
COSINE = {"shaping.cosine_coef": 0.5}
REPETITION = {"shaping.repetition_ngram": 1, "rollout.max_tokens": 24}
MISMATCH = {"algo.mismatch_mask": "token", "algo.mismatch_low": 0.9, "algo.mismatch_high": 1.1}
FP8 = {"fp8.recipe": "tensorwise", "model.dtype": "bf16"}
TRTLLM = {"rollout.engine": "trtllm"}
PROCESS = {**TRTLLM, "trtllm.start_timeout_s": 0.3, "trtllm.max_restarts": 1}
VLLM = {"rollout.engine": "vllm"}
VLLM_PROCESS = {**VLLM, "vllm.start_timeout_s": 0.3, "vllm.max_restarts": 1}
SGLANG = {"rollout.engine": "sglang"}
SGLANG_PROCESS = {**SGLANG, "sglang.start_timeout_s": 0.3, "sglang.max_restarts": 1}
THEORY = {"theory.every": 1}
PARTIAL = {"rollout.partial_tokens": 2}
VERIFIED = {"train.verify_reshard": "always"}
FEW = {"rollout.n": 2, "rollout.refills": 4}
LINEAR = {"optim.lr_schedule": "linear"}
FIXED = {"algo.aggregation": "fixed", "algo.aggregation_tokens": 12}
SOURCE = {"files": ["train.jsonl"], "weight": 1.0}
OTHER = {"files": ["other.jsonl"], "weight": 1.0}
MIXED = {"data.train": None}
ALONE = {"train.share_prompt": False}
BOTH_FORMS = {"data.train": ["both.jsonl"], "data.held_out": None}
QUESTIONS = {"prompt": "question", "answer": "solution"}
COLUMNS = {
    "data.train": ["columns.jsonl"],
    "data.held_out": None,
    "data.columns.prompt": "question",
    "data.columns.answer": "solution",
}
TASK = {"name": "spell_backward", "weight": 1.0}
WORD = r"nus\): (.+)"
GCD = {"name": "gcd"}
TASKS = {"data.train": None, "data.held_out": None, "data.held_out_prompts": 4}
GENERATED = {**TASKS, "data.tasks": [TASK]}
UNWEIGHTED = [{"verifier": "exact"}, {"verifier": "format"}]
BOTH = {
    "name": "both",
    "how": "sum",
    "parts": [{"verifier": "exact", "weight": 0.5}, {"verifier": "format", "weight": 0.5}],
}


def _both(**changes: object) -> list[object]:
    return [{**BOTH, **changes}]


def _parts(verifier: str = "exact", *weights: float) -> list[object]:
    first, second = weights or (0.5, 0.5)
    return _both(parts=[{"verifier": verifier, "weight": first}, {"verifier": "format", "weight": second}])


CASES = {
    "run.dir": Case(built.folders, "elsewhere"),
    "run.seed": Case(steps.step, 4),
    "run.started": Case(built.card, 1e9, before=5e8),
    "run.record_groups": Case(steps.recorded, 1),
    "run.record_tokens": Case(steps.recorded, 40),
    "run.license": Case(built.card, "apache-2.0"),
    "run.progress_timeout_s": Case(built.watched, 0.0),
    "run.ends_at": Case(built.stops, 1.0),
    "run.log": Case(built.writers, ["tensorboard"], before=[]),
    "run.trace_every": Case(steps.run, 1),
    "run.peak_tflops": Case(steps.run, 1.0),
    "model.path": Case(built.shape, "wider"),
    "model.dtype": Case(built.dtypes, "bf16"),
    "model.context": Case(built.long_prompts, 14, refused="train.jsonl"),
    "parallel.tensor": Case(built.plan, 2),
    "parallel.pipeline": Case(built.plan, 2),
    "parallel.context": Case(
        built.waits, 2, beside={"train.share_prompt": False}, refused="parallel.context = 1 x 1 x 2"
    ),
    "parallel.sequence": Case(built.waits, True, refused="parallel.sequence = True: sequence parallelism needs"),
    "parallel.distributed_optimizer": Case(built.megatron, True),
    "parallel.overlap_grad_reduce": Case(built.megatron, True),
    "parallel.overlap_param_gather": Case(built.megatron, True, beside={"parallel.distributed_optimizer": True}),
    "parallel.timeout_s": Case(built.waits, 30.0),
    "fp8.recipe": Case(built.fp8_fields, "blockwise", before="tensorwise", beside={"model.dtype": "bf16"}),
    "fp8.format": Case(built.fp8_fields, "e4m3", beside=FP8),
    "fp8.parameters": Case(built.fp8_fields, True, beside=FP8 | {"parallel.distributed_optimizer": True}),
    "fp8.bf16_layers": Case(built.fp8_fields, 1, beside=FP8),
    "fp8.amax_history": Case(built.fp8_fields, 16, beside=FP8),
    "fp8.head": Case(built.logits, "blockwise"),
    "data.train": Case(built.prompts, ["other.jsonl"], before=["train.jsonl"]),
    "data.mixture": Case(built.prompts, [SOURCE, OTHER], before=[SOURCE], beside=MIXED),
    "data.mixture[].files": Case(built.prompts, [OTHER], before=[{**OTHER, "files": ["train.jsonl"]}], beside=MIXED),
    "data.mixture[].weight": Case(built.prompts, [SOURCE, {**OTHER, "weight": 3.0}], [SOURCE, OTHER], MIXED),
    "data.mixture[].name": Case(built.prompts, [{**SOURCE, "name": "sums"}], before=[SOURCE], beside=MIXED),
    "data.mixture[].verifier": Case(built.prompts, [{**SOURCE, "verifier": "math"}], before=[SOURCE], beside=MIXED),
    "data.held_out": Case(built.prompts, ["other.jsonl"], before=["held_out.jsonl"]),
    "data.columns": Case(built.prompts, QUESTIONS, {}, BOTH_FORMS, "unknown key 'question'"),
    "data.columns.prompt": Case(built.prompts, "kind", beside=COLUMNS, before="question"),
    "data.columns.answer": Case(built.prompts, "key", beside=COLUMNS, before="solution"),
    "data.columns.answer_regex": Case(built.prompts, "(.)$", beside=COLUMNS),
    "data.columns.target": Case(built.prompts, "worked", beside=COLUMNS),
    "data.columns.verifier": Case(built.prompts, "kind", beside=COLUMNS),
    "data.columns.id": Case(built.prompts, "key", beside=COLUMNS),
    "data.columns.metadata": Case(built.prompts, "info", beside=COLUMNS),
    "data.tasks": Case(built.prompts, [TASK, GCD], before=[TASK], beside=TASKS),
    "data.tasks[].name": Case(built.prompts, [{**TASK, "name": "gcd"}], before=[TASK], beside=TASKS),
    "data.tasks[].weight": Case(built.prompts, [{**TASK, "weight": 9.0}, {"name": "gcd"}], [TASK, GCD], TASKS),
    "data.tasks[].prompt_regex": Case(built.prompts, [{**TASK, "prompt_regex": WORD}], [TASK], TASKS),
    "data.tasks[].config": Case(built.prompts, [{**TASK, "config": {"min_word_len": 8}}], before=[TASK], beside=TASKS),
    "data.train_seed": Case(built.prompts, 7, beside=GENERATED),
    "data.held_out_seed": Case(built.prompts, 7, beside=GENERATED),
    "data.held_out_prompts": Case(built.prompts, 5, beside=GENERATED),
    "data.verifier": Case(built.prompts, "math"),
    "data.template": Case(built.prompts, "Q: {prompt}"),
    "data.chat": Case(built.prompts, True),
    "data.system_prompt": Case(built.prompts, "hello", beside={"data.chat": True}),
    "data.chat_template_kwargs": Case(built.prompts, {"greeting": "hi"}, beside={"data.chat": True}),
    "data.skip_bad_rows": Case(built.prompts, True, beside={"data.train": ["bad.jsonl"]}, refused="bad.jsonl:1"),
    "rollout.n": Case(steps.step, 6),
    "rollout.prompts": Case(steps.step, 3),
    "rollout.engine": Case(built.plan, "trtllm"),
    "rollout.temperature": Case(built.sampled, 0.5),
    "rollout.top_p": Case(built.sampled, 0.3),
    "rollout.top_k": Case(built.sampled, 2),
    "rollout.max_tokens": Case(built.sampled, 6),
    "rollout.max_num_seqs": Case(built.sampled, 2),
    "rollout.pull": Case(steps.step, True),
    "rollout.kv_cache_mib": Case(built.crowded, 1),
    "rollout.stop_strings": Case(built.sampled, ["1"]),
    "rollout.dtype": Case(built.sampled, "bf16"),
    "rollout.timeout_s": Case(steps.slow, 0.1),
    "rollout.max_lost_share": Case(steps.losing, 0.0, refused="rollout.max_lost_share = 0"),
    "rollout.partial_tokens": Case(steps.step, 4),
    "rollout.refills": Case(steps.step, 2, beside={"rollout.n": 2}),
    "rollout.max_oversample": Case(built.asks, 2.0, beside=FEW),
    "rollout.max_carried_steps": Case(
        steps.step, 2, beside={"rollout.partial_tokens": 2}, refused="rollout.max_carried_steps = 2"
    ),
    "trtllm.python": Case(engines.starts, "/opt/trtllm/bin/python", beside=PROCESS),
    "trtllm.tensor": Case(engines.arguments, 2),
    "trtllm.memory_fraction": Case(engines.arguments, 0.5),
    "trtllm.kv_dtype": Case(engines.arguments, "fp8"),
    "trtllm.quantization": Case(engines.arguments, "fp8_block"),
    "trtllm.max_num_tokens": Case(engines.arguments, 4096),
    "trtllm.cuda_graphs": Case(engines.arguments, False),
    "trtllm.scheduler": Case(engines.arguments, "MAX_UTILIZATION"),
    "trtllm.overlap": Case(engines.arguments, False),
    "trtllm.ray_port": Case(engines.arguments, 25000),
    "trtllm.transport": Case(
        engines.transports, "cuda_ipc", beside=TRTLLM, refused='trtllm.transport = "cuda_ipc": there is no GPU'
    ),
    "trtllm.shared_memory": Case(engines.starts, "memory", beside=PROCESS),
    "trtllm.start_timeout_s": Case(engines.patience, 0.9, before=0.1, beside=TRTLLM),
    "trtllm.heartbeat_timeout_s": Case(engines.silence, 5.0, beside=TRTLLM),
    "trtllm.max_restarts": Case(engines.starts, 3, before=1, beside=TRTLLM),
    "vllm.python": Case(engines.starts, "/opt/vllm/bin/python", beside=VLLM_PROCESS),
    "vllm.tensor": Case(engines.vllm_arguments, 2),
    "vllm.memory_fraction": Case(built.plan, 0.5, beside=VLLM),
    "vllm.kv_dtype": Case(engines.vllm_arguments, "fp8"),
    "vllm.quantization": Case(engines.vllm_arguments, "fp8"),
    "vllm.max_num_tokens": Case(engines.vllm_arguments, 4096),
    "vllm.cuda_graphs": Case(engines.vllm_arguments, False),
    "vllm.transport": Case(
        engines.transports, "cuda_ipc", beside=VLLM, refused='vllm.transport = "cuda_ipc": there is no GPU'
    ),
    "vllm.shared_memory": Case(engines.starts, "memory", beside=VLLM_PROCESS),
    "vllm.start_timeout_s": Case(engines.patience, 0.9, before=0.1, beside=VLLM),
    "vllm.heartbeat_timeout_s": Case(engines.silence, 5.0, beside=VLLM),
    "vllm.max_restarts": Case(engines.starts, 3, before=1, beside=VLLM),
    "sglang.python": Case(engines.starts, "/opt/sglang/bin/python", beside=SGLANG_PROCESS),
    "sglang.tensor": Case(engines.sglang_arguments, 2),
    "sglang.memory_fraction": Case(engines.sglang_arguments, 0.5),
    "sglang.kv_dtype": Case(engines.sglang_arguments, "fp8"),
    "sglang.quantization": Case(engines.sglang_arguments, "fp8", refused="sglang.quantization = 'fp8': must be"),
    "sglang.max_num_tokens": Case(engines.sglang_arguments, 4096),
    "sglang.cuda_graphs": Case(engines.sglang_arguments, False),
    "sglang.transport": Case(
        engines.transports, "cuda_ipc", beside=SGLANG, refused='sglang.transport = "cuda_ipc": there is no GPU'
    ),
    "sglang.shared_memory": Case(engines.starts, "memory", beside=SGLANG_PROCESS),
    "sglang.start_timeout_s": Case(engines.patience, 0.9, before=0.1, beside=SGLANG),
    "sglang.heartbeat_timeout_s": Case(engines.silence, 5.0, beside=SGLANG),
    "sglang.max_restarts": Case(engines.starts, 3, before=1, beside=SGLANG),
    "reward.workers": Case(built.serving, 2),
    "reward.timeout_s": Case(built.serving, 0.1, beside={"data.verifier": "slow.py:score"}),
    "reward.max_chars": Case(judged.found, 1, beside={"reward.extract": "full"}),
    "reward.extract": Case(judged.found, "boxed"),
    "reward.combination": Case(judged.found, [BOTH]),
    "reward.combination[].name": Case(judged.found, _both(name="two"), before=[BOTH], refused="'both'"),
    "reward.combination[].how": Case(judged.found, _both(how="product", parts=UNWEIGHTED), before=[BOTH]),
    "reward.combination[].parts": Case(judged.found, _parts("math"), before=[BOTH]),
    "reward.combination[].parts[].verifier": Case(judged.found, _parts("choice"), before=[BOTH]),
    "reward.combination[].parts[].weight": Case(judged.found, _parts("exact", 0.75, 0.25), before=[BOTH]),
    "reward.unsandboxed": Case(judged.sandboxed, True, refused="bubblewrap is missing"),
    "reward.correct_at": Case(judged.credit, 0.5),
    "reward.strict": Case(judged.credit, True),
    "reward.cut_off_factor": Case(judged.credit, 0.5),
    "shaping.overlong_tokens": Case(steps.step, 4),
    "shaping.cosine_coef": Case(steps.step, 0.5),
    "shaping.cosine_min": Case(steps.step, -1.0, beside=COSINE),
    "shaping.cosine_max": Case(steps.step, 0.5, beside=COSINE),
    "shaping.cosine_on_steps": Case(steps.step, 1, beside=COSINE),
    "shaping.cosine_off_steps": Case(steps.long, 0, before=2, beside={**COSINE, "shaping.cosine_on_steps": 1}),
    "shaping.repetition_ngram": Case(steps.step, 1),
    "shaping.repetition_penalty": Case(steps.step, 0.1, beside=REPETITION),
    "algo.advantage": Case(steps.step, "grpo"),
    "algo.gamma": Case(steps.step, 0.9, beside=GAE),
    "algo.lam": Case(steps.step, 0.9, beside=GAE),
    "algo.dynamic_sampling": Case(steps.step, False, beside={"rollout.n": 2}),
    "algo.correct_boost": Case(steps.step, 0.5),
    "algo.overlong_filter": Case(steps.step, True),
    "algo.pass_k": Case(steps.step, 2, before=1, beside={"algo.advantage": "pass_at_k", "reward.strict": True}),
    "algo.kl_coef": Case(steps.step, 0.1),
    "algo.kl_estimator": Case(steps.step, "k3", beside=KL),
    "algo.kl_in": Case(steps.step, "reward", beside=KL),
    "algo.policy_loss": Case(steps.step, "cispo"),
    "algo.eps_low": Case(steps.step, 0.001),
    "algo.eps_high": Case(steps.step, 0.001),
    "algo.dual_clip": Case(steps.step, 1.001, beside={"algo.eps_high": 0.0005}),
    "algo.tau_pos": Case(steps.step, 2.0, beside={"algo.policy_loss": "sapo"}),
    "algo.tau_neg": Case(steps.step, 2.0, beside={"algo.policy_loss": "sapo"}),
    "algo.ratio": Case(steps.step, "sequence"),
    "algo.is_cap": Case(steps.step, 1.01),
    "algo.mismatch_mask": Case(steps.step, "token", beside={"algo.mismatch_low": 0.9, "algo.mismatch_high": 1.1}),
    "algo.mismatch_low": Case(steps.step, 0.5, beside=MISMATCH),
    "algo.mismatch_high": Case(steps.step, 2.0, beside=MISMATCH),
    "algo.entropy_coef": Case(steps.step, 0.1),
    "algo.aggregation": Case(steps.step, "sequence_mean"),
    "algo.aggregation_tokens": Case(steps.step, 24, beside=FIXED),
    "algo.old_log_probs": Case(steps.step, "rollout"),
    "algo.mini_batches": Case(steps.step, 1),
    "algo.mini_batch_of": Case(steps.step, "siblings"),
    "algo.epochs": Case(steps.step, 2),
    "critic.lr": Case(steps.step, 1e-3, beside=GAE),
    "critic.lr_warmup_steps": Case(steps.step, 4, beside=GAE),
    "critic.warmup_steps": Case(steps.step, 1, beside=GAE),
    "critic.clip": Case(steps.step, 1e-6, beside={**GAE, "critic.lr": 1e-2}),
    "reference.reset_every": Case(steps.run, 1, beside=KL),
    "reference.reset_patience": Case(steps.run, 1, beside=REFERENCE),
    "reference.reset_above_kl": Case(steps.run, 1e-9, beside=KL),
    "reference.reset_optimizer": Case(steps.run, True, beside={**KL, "reference.reset_every": 1}),
    "ops.implementation": Case(built.operations, "reference"),
    "optim.lr": Case(steps.step, 1e-3),
    "optim.lr_for_rollouts": Case(steps.step, 64),
    "optim.lr_counts": Case(steps.step, "kept", beside={"optim.lr_for_rollouts": 64, "rollout.n": 2}),
    "optim.warmup_steps": Case(steps.step, 8),
    "optim.lr_schedule": Case(steps.step, "cosine", before="linear"),
    "optim.min_lr_ratio": Case(steps.step, 0.5, beside=LINEAR),
    "optim.lr_decay_steps": Case(steps.step, 2, beside=LINEAR),
    "optim.betas": Case(steps.step, [0.5, 0.9]),
    "optim.eps": Case(steps.step, 1e-2),
    "optim.weight_decay": Case(steps.step, 0.5),
    "optim.decay_norms_and_biases": Case(steps.step, True),
    "optim.clip_grad": Case(steps.step, 1e-3),
    "train.steps": Case(steps.run, 1),
    "train.max_seconds": Case(steps.run, 1e-6),
    "train.patience": Case(steps.run, 1, beside={"train.steps": 4, "evaluate.every": 1}),
    "train.min_delta": Case(steps.stalls, 0.5),
    "train.tokens_per_micro_batch": Case(built.packed, 64),
    "train.recompute": Case(built.layers, True),
    "train.recompute_attention": Case(built.layers, True),
    "train.offload": Case(built.plan, True),
    "train.share_prompt": Case(built.packed, False),
    "train.checkpoint_every": Case(steps.run, 1),
    "train.keep_checkpoints": Case(steps.run, 1, beside={"train.checkpoint_every": 1}),
    "train.resume": Case(built.checkpoints, "never"),
    "train.keep_best": Case(steps.run, "pass_at_1", beside={"evaluate.every": 1}),
    "train.checkpoint_async": Case(steps.written, False, beside={"train.checkpoint_every": 1}),
    "train.max_nonfinite_steps": Case(steps.broken, 1, refused="train.max_nonfinite_steps"),
    "train.verify_reshard": Case(steps.step, "always", refused="train.verify_reshard: after version 0"),
    "train.verify_tolerance": Case(steps.step, 1e3, beside=VERIFIED, refused="train.verify_tolerance"),
    "theory.every": Case(steps.step, 1),
    "theory.prompts": Case(steps.step, 1, beside=THEORY),
    "theory.positions": Case(steps.step, 2, beside=THEORY),
    "theory.max_position": Case(steps.step, 1, beside=THEORY),
    "evaluate.every": Case(steps.run, 1),
    "evaluate.samples": Case(steps.evaluation, 2),
    "evaluate.pass_at": Case(steps.evaluation, [3]),
    "evaluate.benchmarks": Case(built.benchmarks, ["sums=other.jsonl"]),
    "evaluate.temperature": Case(steps.evaluation, 1.0),
    "evaluate.top_p": Case(steps.evaluation, 0.5),
    "evaluate.top_k": Case(steps.evaluation, 5),
    "evaluate.bootstrap": Case(steps.evaluation, 50),
    "sft.steps": Case(built.warm, 1),
    "sft.examples_per_step": Case(built.warm, 4),
    "sft.lr": Case(built.warm, 1e-2),
    "sft.warmup_steps": Case(built.warm, 1),
    "sft.weight_decay": Case(built.warm, 0.5),
}
