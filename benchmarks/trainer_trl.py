"""TRL's GRPOTrainer on a CPU, for benchmarks/bench_step.py --trl-python. Imports nothing from this project.

One optimizer step per generation batch: all siblings of a prompt are generated in one call of transformers' generate,
then trained on in micro-batches. Options are TRL's defaults, except the dtype, no gradient checkpointing (there is
enough memory), no saving, and one log line per step. There is no reference model (beta = 0 is TRL's default).
"""

from __future__ import annotations

import re
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from measure import answer, forget_peak, read_job, status_kib
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return 1 if the text inside the last <answer>...</answer> is 1, as the verifier of the other side does."""
    found = [re.findall(r"<answer>(.*?)</answer>", text) for text in completions]
    return [float(bool(answers) and answers[-1] == "1") for answers in found]


class Timed(GRPOTrainer):
    """Sums the seconds of the two phases of a step. The rest of the step is training."""

    generating = scoring = 0.0
    completion_tokens = 0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.generating += time.perf_counter() - start
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._calculate_rewards(*args, **kwargs)
        self.scoring += time.perf_counter() - start
        self.completion_tokens += sum(map(len, args[-1] if args else kwargs["completion_ids_list"]))
        return result


class Steps(TrainerCallback):
    """The seconds of every optimizer step by phase."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.trainer: Timed
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()
        self.trainer.generating = self.trainer.scoring = 0.0
        self.trainer.completion_tokens = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step = time.perf_counter() - self.started
        t = self.trainer
        self.rows.append(
            {
                "generate": t.generating,
                "score": t.scoring,
                "train": step - t.generating - t.scoring,
                "step": step,
                "tokens": t.completion_tokens,
            }
        )


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    n = job["n"]
    groups = job["groups"]
    micro_batch = min(job["micro_batch"], n)

    # The options of TRL that are closest to a step of this project.
    arguments = GRPOConfig(
        output_dir=f"{job['scratch']}/trl",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": {"fp32": "float32", "bf16": "bfloat16"}[job["dtype"]]},
        max_steps=len(job["prompts"]) // groups,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=groups * n // micro_batch,  # generated in one go, one optimizer step
        num_generations=n,
        max_completion_length=job["response"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        epsilon_high=0.28,
        learning_rate=1e-6,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )

    # TRL's trainer, timed by callbacks.
    steps = Steps()
    trainer = Timed(
        model=job["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[steps],
    )
    steps.trainer = trainer

    # Memory is measured from here on.
    forget_peak()
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    answer(steps=steps.rows, rewards=rewards, peak_mib=status_kib("VmHWM") / 1024, version=f"trl {trl.__version__}")


if __name__ == "__main__":
    main()
