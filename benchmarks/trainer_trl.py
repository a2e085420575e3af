"""TRL's GRPOTrainer on a CPU or a GPU, for bench_step.py and compare_trl.py. Imports nothing from this project.

All siblings of a step are generated in one call of transformers' generate, then trained on in micro-batches. The job
has the rows in their order, the options of GRPOConfig that are specific to the benchmark, and the reward: a response
is right if the last match of `pattern` is the answer of its row. Other options are TRL's defaults, except the dtype, no
gradient checkpointing (there is enough memory), no saving of checkpoints, and one log line per optimizer step. There is
no reference model (beta = 0 is TRL's default).
"""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar

import torch
import trl
from datasets import Dataset
from measure import answer, forget_peak, peak_mib, read_job
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

JOB: dict[str, Any] = {"stop_ids": [], "cut_off_factor": 1.0, "warmup_steps": 0} | read_job()
STOP_IDS = set(JOB["stop_ids"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def reward(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for a right response, times the factor of the job if it ended at the length limit."""
    matches = [re.findall(JOB["pattern"], text) for text in completions]
    right = [bool(texts) and texts[-1].strip() == a for texts, a in zip(matches, answer, strict=True)]
    factors = [1.0 if ids[-1] in STOP_IDS else JOB["cut_off_factor"] for ids in completion_ids]
    return [r * factor for r, factor in zip(right, factors, strict=True)]


class Timed(GRPOTrainer):
    """Measures steps. A step begins with the generation of its responses, and ends where the next one begins."""

    steps: ClassVar[list[dict[str, float]]] = []

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.steps.append({"start": start, "generate": time.perf_counter() - start})
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._calculate_rewards(*args, **kwargs)
        tokens = sum(map(len, args[-1] if args else kwargs["completion_ids_list"]))
        self.steps[-1] |= {"score": time.perf_counter() - start, "tokens": tokens, "reward": result.mean().item()}
        return result

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        ends = [step["start"] for step in self.steps[1:]] + [time.perf_counter()]
        for step, end in zip(self.steps, ends, strict=True):
            step["step"] = end - step["start"]
            step["train"] = step["step"] - step["generate"] - step["score"]
        return result

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Use the warm-up of this project. In that of transformers, the first update has a learning rate of 0."""
        warmup = max(JOB["warmup_steps"], 1)
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda update: min(1.0, (update + 1) / warmup))
        return self.lr_scheduler


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    output = f"{JOB['scratch']}/trl"
    model: Any = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=DTYPES[JOB["dtype"]])
    model.generation_config.eos_token_id = JOB["stop_ids"]
    arguments = GRPOConfig(
        output_dir=output,
        use_cpu=JOB["device"] == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **JOB["arguments"],
    )

    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(JOB["rows"]),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"]),
    )

    # Memory is measured from here on, until the model is saved.
    forget_peak(JOB["device"])
    trainer.train()
    peak = peak_mib(JOB["device"])
    trainer.save_model()
    answer(steps=trainer.steps, model=output, peak_mib=peak, version=f"trl {trl.__version__}")


if __name__ == "__main__":
    main()
