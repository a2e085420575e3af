"""OpenVINO GenAI's continuous batching, for bench_rollout.py --openvino-python. Imports nothing of this project.

One request with n siblings where all lengths are equal. Else one request per sibling with its own max_new_tokens, and
the first goes a step ahead, so that the others find its prompt in the prefix cache. Inference and KV cache have the
job's precision (by default the KV cache would be quantised to 8 bits).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openvino
import openvino_genai as genai
from measure import answer, read_job, time_rollouts

EXPORT = """
import sys
from optimum.intel import OVModelForCausalLM
model = OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, compile=False, load_in_8bit=False)
model.save_pretrained(sys.argv[2])
"""
PRECISION = {"fp32": openvino.Type.f32, "bf16": openvino.Type.bf16}


def sampling(tokens: int, count: int, seed: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.do_sample, config.temperature, config.top_p, config.top_k = True, 1.0, 1.0, 0
    config.num_return_sequences, config.rng_seed = count, seed
    config.max_new_tokens = config.min_new_tokens = tokens
    config.ignore_eos = True
    config.set_eos_token_id(0)  # it wants one all the same
    return config


def main() -> None:
    job = read_job()
    n, precision = len(job["lengths"]), PRECISION[job["dtype"]]
    exported = Path(job["scratch"]) / "openvino"
    # In a process of its own, because torch must not count as memory of the engine.
    subprocess.run([sys.executable, "-c", EXPORT, job["model"], str(exported)], check=True, stdout=sys.stderr)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = job["kv_gib"]
    scheduler.max_num_seqs = n  # the default would run the siblings in waves
    scheduler.max_num_batched_tokens = max(2048, 4 * n)
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        exported,
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job["threads"],
        },
    )

    def generate(prompt: list[int], lengths: list[int], seed: int) -> list[list[int]]:
        ids = openvino.Tensor([prompt])
        if len(set(lengths)) == 1:
            handles = [pipeline.add_request(0, ids, sampling(lengths[0], n, seed))]
        else:
            handles = [pipeline.add_request(0, ids, sampling(lengths[0], 1, seed * n))]
            pipeline.step()
            handles += [pipeline.add_request(i, ids, sampling(lengths[i], 1, seed * n + i)) for i in range(1, n)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(o.generated_ids) for handle in handles for o in handle.read_all()]

    answer(**time_rollouts(job, generate), version=f"openvino-genai {genai.__version__}")


if __name__ == "__main__":
    main()
