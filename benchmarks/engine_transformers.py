"""transformers' generate with num_return_sequences, for bench_rollout.py. Imports nothing from this project."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from measure import answer, read_job, time_rollouts
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_TOKENS = 16  # tokens of the first call: a few warm up, because nothing is compiled; a whole call may take minutes
JOB = read_job()
DEVICE = torch.device(JOB["device"])


class Lengths(StoppingCriteria):
    """Finishes row i at its length; generate continues until all rows are finished."""

    def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
        self.ends = torch.tensor(lengths, device=DEVICE) + prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.ends


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=DTYPES[JOB["dtype"]]).eval().to(DEVICE)

    def generate(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        stops = [Lengths(lengths, len(prompt))] if len(set(lengths)) > 1 else []
        ids = model.generate(
            torch.tensor([prompt], device=DEVICE),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=DEVICE),
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_return_sequences=len(lengths),
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths) if not stops else None,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList(stops),
        )
        return [row[len(prompt) :][:n].tolist() for row, n in zip(ids, lengths, strict=True)]

    with torch.inference_mode():
        timings = time_rollouts(JOB, generate, WARM_TOKENS)
    answer(**timings, version=f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
