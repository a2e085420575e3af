"""vLLM on a CPU or a GPU, for benchmarks/bench_rollout.py --vllm-python. Imports nothing from this project.

If all lengths are equal, there is one request with n siblings; otherwise there is one request per sibling with its own
max_tokens, and the prefix cache, on by default, shares the prompt. There is no tokenizer and no log-probability.
"""

from __future__ import annotations

import os
import sys

from measure import answer, read_job, time_rollouts

job = read_job()
# vLLM reads these variables when it is imported. It uses one process, whose memory and time are measured.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job["kv_gib"])
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import vllm  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402


def main() -> None:
    n = len(job["lengths"])
    longest = max(job["lengths"])
    llm = LLM(
        model=job["model"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[job["dtype"]],
        skip_tokenizer_init=True,
        max_model_len=len(job["prompts"][0]) + longest,
        max_num_seqs=n,  # the default would run the siblings in waves
        max_num_batched_tokens=max(2048, 4 * n),
        disable_log_stats=True,
    )

    def generate(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        def sampling(tokens: int, count: int) -> SamplingParams:
            return SamplingParams(
                n=count, temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
            )

        token_prompt = TokensPrompt(prompt_token_ids=prompt)
        if len(set(lengths)) == 1:
            (result,) = llm.generate([token_prompt], sampling(lengths[0], n), use_tqdm=False)
            return [list(o.token_ids) for o in result.outputs]
        results = llm.generate([token_prompt] * n, [sampling(tokens, 1) for tokens in lengths], use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in results]

    answer(**time_rollouts(job, generate), version=f"vllm {vllm.__version__}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's worker threads outlive main
