"""vLLM by this project's leaf and nothing else of it, for benchmarks/bench_rollout.py: a request with a seed and
log-probabilities per sibling, as training asks, with no process and no message between. Weights are as vLLM makes them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from measure import answer, end_family, family_peak_mib, read_job, time_rollouts

sys.path.insert(0, str(Path(__file__).parents[1]))  # of another environment than this project's
from vllm_job import engine_options

from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote.segments import unlink_segments

job = read_job()
os.environ.update({name: x.format(folder=job["scratch"]) for name, x in ENGINES["vllm"].environment.items()})

from megatron_brorl.rollout.remote.vllm.llm import Llm, vllm  # noqa: E402


def main() -> None:
    options, loop = engine_options(job), asyncio.new_event_loop()
    llm, begun = Llm(options), time.perf_counter()
    loop.run_until_complete(llm.start())
    start_s = time.perf_counter() - begun

    async def siblings(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        handles = [
            llm.submit(prompt, llm.params(1.0, 1.0, 0, tokens, (seed << 32) + i)) for i, tokens in enumerate(lengths)
        ]
        return [(await llm.completion(handle)).token_ids for handle in handles]

    def generate(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        return loop.run_until_complete(siblings(prompt, lengths, seed))

    found = {**time_rollouts(job, generate), "peak_mib": family_peak_mib()}
    answer(**found, start_s=start_s, version=f"vllm {vllm.__version__}")


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setsid()  # a group of its own, whose shared memory is told from others'
    main()
    # vLLM's core and worker outlive the process that has started them.
    unlink_segments(os.getpid())
    end_family()
    os._exit(0)
