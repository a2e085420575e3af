"""Measure how much a slow tool delays the built-in engine: N = 512 episodes whose turns wait 0 to 200 ms for a reply.

    python benchmarks/bench_turns.py [--quick] [--json FILE] [--model m30] [--rows 256] [--workers 4] [--threads N]
                                    [--repeat N]

Both arms sample the same tokens. `rows` is the mean number of rows per decoding step by the engine's counters, and
`rate` the tokens per second relative to the arm whose environment answers at once.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_common import MODELS, options, write_model, write_rows
from safetensors.torch import load_file
from torch import Tensor

from megatron_brorl.config.environment import EnvironmentConfig
from megatron_brorl.environments.pool import EnvironmentPool
from megatron_brorl.families.shape import WEIGHTS, read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused.decode import sample_tokens
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.types import Prompt

FACTORY = f"{Path(__file__).parent}/sleeping_environment.py:Sleeper"
PROMPT = tuple(range(2, 66))
OBSERVATION = tuple(range(70, 78))
STOP = 1
TURN_TOKENS = 24
TURNS = 4


def main() -> None:
    parser = options(__doc__, "32 episodes on model t4", 3, "runs per arm, in turn; the table shows all")
    parser.add_argument("--model", choices=MODELS, default="m30")
    parser.add_argument("--rows", type=int, default=256, help="sequences decoded at a time (default 256)")
    parser.add_argument("--workers", type=int, default=4, help="processes of the environments (default 4)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name, n, slots, repeat = ("t4", 32, 16, 1) if args.quick else (args.model, 512, args.rows, args.repeat)

    sampling = Sampling(1.0, 1.0, 0, TURNS * (TURN_TOKENS + len(OBSERVATION)), (STOP,))
    config = EnvironmentConfig(factory=FACTORY, max_turns=TURNS)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, EnvironmentPool(FACTORY, args.workers, 60.0, "tags") as pool:
        write_model(name, Path(folder))
        shape = read_shape(folder)
        device = torch.device("cpu")
        engine = TorchEngine(
            shape, hf_shapes(shape), device, torch.float32, slots, sample_turns, backend("fused", device).decode
        )
        engine.update_weights(load_file(f"{folder}/{WEIGHTS}").items(), 0)
        turns = TurnEngine(engine, pool, config, lambda ids: "", lambda messages, after_stop: [*OBSERVATION])
        print("seconds of the tool   seconds   tokens/s   steps   rows   rate")
        for _ in range(repeat):
            for seconds in (0.0, 0.2):
                found.append(measure(turns, n, sampling, seconds))
                row = found[-1]
                row["rate"] = row["tokens_per_s"] / next(r for r in reversed(found) if not r["tool_s"])["tokens_per_s"]
                print(
                    f"{f'0 to {seconds:g}':<22}{row['seconds']:>7.2f}{row['tokens_per_s']:>11.0f}{row['steps']:>8}"
                    f"{row['rows']:>7.0f}{row['rate']:>7.1%}"
                )
    write_rows(args.json, found)


def sample_turns(
    logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, t: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Sample tokens as the engine does, but end each turn after TURN_TOKENS."""
    ids, log_probs = sample_tokens(logits, keys, index, position, t, top_p, top_k)
    ids = torch.where(ids == STOP, STOP + 1, ids)
    ends = position % (TURN_TOKENS + len(OBSERVATION)) == TURN_TOKENS - 1
    return torch.where(ends, STOP, ids), log_probs


def measure(engine: TurnEngine, n: int, sampling: Sampling, seconds: float) -> dict[str, Any]:
    """Sample n episodes whose environment waits up to `seconds` per turn."""
    prompt = Prompt("p", "", PROMPT, None, ENVIRONMENT, {"seconds": seconds, "turns": TURNS})
    start = time.perf_counter()
    (rollouts,) = engine.generate([Request(prompt, 1, n)], sampling)
    taken = time.perf_counter() - start
    tokens = sum(r.sampled_tokens for r in rollouts)
    steps = engine.kv_usage().steps
    return {
        "tool_s": seconds,
        "seconds": taken,
        "tokens_per_s": tokens / taken,
        "steps": steps,
        "rows": tokens / steps,
    }


if __name__ == "__main__":
    main()
