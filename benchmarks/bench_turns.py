"""Measure the delay of the built-in engine by a slow tool, and the CPU time of an agent's calls.

    python benchmarks/bench_turns.py [--quick] [--json FILE] [--model m30] [--rows 256] [--workers 4] [--threads N]
                                    [--repeat N]

N = 512 episodes have turns that wait 0 to 200 ms for a reply of the environment; 512 agents make as many calls through
HTTP. All arms sample equally many tokens. `rows` is the mean number of rows per decoding step by the engine's counters,
and `rate` the tokens per second relative to the arm whose environment answers at once. Then the agents run once more
with completions that cost nothing, so all CPU time, of this process and of its children, is that of their calls.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from bench_common import MODELS, options, write_model, write_rows
from safetensors.torch import load_file
from torch import Tensor

from megatron_brorl.config.schema import AgentConfig, EnvironmentConfig
from megatron_brorl.environments.agents import Agents
from megatron_brorl.environments.pool import EnvironmentPool
from megatron_brorl.families.shape import WEIGHTS, read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.fused.decode import sample_tokens
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.agents.agent_engine import AgentEngine, FixedText
from megatron_brorl.rollout.agents.sequences import Chat
from megatron_brorl.rollout.engine import Request, RolloutEngine, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.turns import TurnEngine
from megatron_brorl.types import Prompt, Rollout

FACTORY = f"{Path(__file__).parent}/sleeping_environment.py:Sleeper"
AGENT = f"{Path(__file__).parent}/calling_agent.py:solve"
PROMPT = tuple(range(2, 66))  # arbitrary token ids
OBSERVATION = tuple(range(70, 78))  # other arbitrary token ids
STOP = 1  # the token that ends a turn
TURN_TOKENS = 24
TURNS = 4


def main() -> None:
    parser = options(
        __doc__, quick="32 episodes on model t4", repeat=3, repeats="runs per arm, in turn; the table shows all"
    )
    parser.add_argument("--model", choices=MODELS, default="m30")
    parser.add_argument("--rows", type=int, default=256, help="sequences decoded at a time (default 256)")
    parser.add_argument("--workers", type=int, default=4, help="processes of the environments (default 4)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name, n, slots, repeat = ("t4", 32, 16, 1) if args.quick else (args.model, 512, args.rows, args.repeat)

    sampling = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=TURNS * (TURN_TOKENS + len(OBSERVATION)),
        stop_ids=(STOP,),
    )
    config = EnvironmentConfig(factory=FACTORY, max_turns=TURNS)
    measurements: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(EnvironmentPool(FACTORY, args.workers, 60.0, "tags")) as pool,
    ):
        write_model(name, Path(folder))
        shape = read_shape(folder)
        device = torch.device("cpu")
        ops = backend("fused", device).decode
        engine = TorchEngine(shape, hf_shapes(shape), device, torch.float32, slots, sample=sample_turns, ops=ops)
        engine.update_weights(load_file(f"{folder}/{WEIGHTS}").items(), version=0)
        turns = TurnEngine(engine, pool, config, lambda ids: "", lambda messages, after_stop: [*OBSERVATION])
        agents = agent_engine(engine, n, slots)
        arms: dict[str, tuple[RolloutEngine, float]] = {
            "0 s": (cast(RolloutEngine, turns), 0.0),
            "0 to 0.2 s": (cast(RolloutEngine, turns), 0.2),
            "agent": (cast(RolloutEngine, agents), 0.0),
        }
        print("arm         seconds   tokens/s   steps   rows   rate")
        for _ in range(repeat):
            for arm, (turn_engine, tool_s) in arms.items():
                row = {"arm": arm, **measure(turn_engine, n, sampling, tool_s)}
                measurements.append(row)
                undelayed = next(r for r in reversed(measurements) if r["arm"] == "0 s")
                row["rate"] = row["tokens_per_s"] / undelayed["tokens_per_s"]
                print(
                    f"{arm:<12}{row['seconds']:>7.2f}{row['tokens_per_s']:>11.0f}{row['steps']:>8}"
                    f"{row['rows']:>7.0f}{row['rate']:>7.1%}"
                )
        agents.engine = cast(RolloutEngine, FixedText([2] * (TURN_TOKENS - 1) + [STOP]))
        measurements += [{"arm": "calls", **cost(agents, n, sampling)} for _ in range(repeat)]
        agents.close()
    write_rows(args.json, measurements)


def agent_engine(engine: TorchEngine, n: int, slots: int) -> AgentEngine:
    """Return an engine whose rollouts are agents, for a model without a tokenizer."""
    prompt_tokens = len(PROMPT) + TURNS * (TURN_TOKENS + len(OBSERVATION))
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    config = AgentConfig(function=AGENT, max_calls=TURNS)
    render, proceed = (lambda *_: [*PROMPT]), (lambda *_: [*OBSERVATION])
    chat = Chat(config, prompt_tokens, format=None, decode=decode, render=render, proceed=proceed)
    return AgentEngine(engine, EnvironmentPool(AGENT, 1, 600.0, kind=Agents), chat)


def cost(engine: AgentEngine, n: int, sampling: Sampling) -> dict[str, Any]:
    """Run n agents on completions that cost nothing, and return the CPU time of a call in all processes."""
    process = psutil.Process()

    def cpu() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in (process, *process.children()))

    run(engine, n=8, sampling=sampling, tool_s=0.0)  # The process of the agents and its client start.
    before = cpu()
    calls = sum(r.episode.turns for r in run(engine, n, sampling, tool_s=0.0) if r.episode)
    milliseconds = 1e3 * (cpu() - before) / calls
    print(f"{calls} calls: {milliseconds:.2f} ms of CPU each")
    return {"calls": calls, "cpu_ms_per_call": milliseconds}


def sample_turns(
    logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Sample tokens as the engine does, but end each turn after TURN_TOKENS."""
    ids, log_probs = sample_tokens(logits, keys, index, position, temperature, top_p, top_k)
    ids = torch.where(ids == STOP, STOP + 1, ids)
    ends = position % (TURN_TOKENS + len(OBSERVATION)) == TURN_TOKENS - 1
    return torch.where(ends, STOP, ids), log_probs


def run(engine: RolloutEngine, n: int, sampling: Sampling, tool_s: float) -> list[Rollout]:
    """Sample n episodes whose environment waits up to `tool_s` seconds per turn, or n agents."""
    metadata = {"seconds": tool_s, "turns": TURNS}
    prompt = Prompt(id="p", text="", token_ids=PROMPT, answer=None, verifier=ENVIRONMENT, metadata=metadata)
    if not isinstance(engine, TurnEngine):
        sampling = replace(sampling, shares_prefixes=False, max_tokens=TURN_TOKENS)
    (rollouts,) = engine.generate([Request(prompt, key=1, n=n)], sampling)
    return rollouts


def measure(engine: RolloutEngine, n: int, sampling: Sampling, tool_s: float) -> dict[str, Any]:
    """Run and measure the time, the tokens and the decoding steps."""
    start = time.perf_counter()
    rollouts = run(engine, n, sampling, tool_s)
    elapsed = time.perf_counter() - start
    tokens = sum(r.sampled_tokens for r in rollouts)
    usage = engine.kv_usage()
    assert usage is not None
    return {
        "tool_s": tool_s,
        "seconds": elapsed,
        "tokens_per_s": tokens / elapsed,
        "steps": usage.steps,
        "rows": tokens / usage.steps,
    }


if __name__ == "__main__":
    main()
