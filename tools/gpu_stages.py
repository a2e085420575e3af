"""The stages of tools/gpu_check.py: python tools/gpu_stages.py STAGE JOB.json ROWS.jsonl

Every row is written as soon as it is known, so that a crash or a kill loses no earlier row.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Settings of all stages."""

    device: str  # "cuda", or "cpu": the dry mode, with tiny sizes
    scratch: str  # folder for models, runs and logs, the same for all stages
    pythons: dict[str, str]  # interpreter of each engine, by rollout.engine

    @property
    def dry(self) -> bool:
        """Return whether the stages run in the dry mode."""
        return self.device == "cpu"


def judged(what: str, wrong: str, **metrics: Any) -> Row:
    """Return a row: ok if `wrong` is empty, else failed with that reason."""
    return {"what": what, "result": f"failed: {' '.join(wrong.split())[:300]}" if wrong else "ok", **metrics}


def missing(what: str, why: str) -> Row:
    """Return a row about something that this machine lacks."""
    return {"what": what, "result": f"missing: {why}"}


def attempt(what: str, call: Callable[[], Row]) -> Row:
    """Return the row of `call`, or one with its exception, so that the next row is still tried."""
    try:
        return call()
    except Exception as e:
        return judged(what, f"{type(e).__name__}: {e}")


# Stage "build".


def build(job: Job) -> Iterator[Row]:
    """Build csrc with CUDA for the torch that is installed, and run the tests of the kernels."""
    if job.dry:
        yield missing("csrc with CUDA", "no GPU in the dry mode")
        yield attempt("tests", lambda: _tests(["tests/ops/test_value_loss.py"]))
        return
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")
    if nvcc is None:
        yield missing("csrc with CUDA", "nvcc: install the CUDA toolkit or set CUDA_HOME")
        return
    yield attempt("csrc with CUDA", lambda: _build(nvcc))
    if importlib.util.find_spec("pytest"):
        yield attempt("tests", lambda: _tests(["tests/gpu", "-k", "cuda"]))
    else:
        yield missing("tests", "pip install pytest")


def _build(nvcc: str) -> Row:
    settings = {"BRORL_CUDA": "1", "BRORL_NATIVE": "1", "CUDA_HOME": str(Path(nvcc).resolve().parents[1])}
    begun = time.perf_counter()
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    wrong = (done.stdout + done.stderr).strip()[-300:] if done.returncode else ""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    return judged("csrc with CUDA", wrong, nvcc=version, seconds=time.perf_counter() - begun)


def _tests(arguments: list[str]) -> Row:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    passed = re.search(r"(\d+) passed", last)
    return judged("tests", "" if passed and not done.returncode else last, passed=int(passed[1]) if passed else 0)


# Stage "ops".

LOSS = {"cuda": (16384, 1536, 151936), "cpu": (64, 32, 1031)}  # tokens, hidden size, vocabulary
CHECKED = 1024  # maximum number of these tokens that are compared with float64
TOKENS = {"cuda": 1 << 24, "cpu": 1 << 12}  # number of tokens for the ops over tokens
LENGTH = 512  # tokens of a segment and rollouts of a group
LOSS_ERROR = {"bf16": 2e-2, "fp32": 1e-5}  # relative error of the gradients, in the Euclidean norm
ERROR = 1e-5  # relative error of the ops over tokens, in float32


def ops(job: Job) -> Iterator[Row]:
    """Compare each fused op with float64 on the same device, and measure its speed."""
    for dtype in ("fp32",) if job.dry else ("bf16", "fp32"):
        what = f"linear_ppo_loss {dtype}"
        yield attempt(what, partial(_loss, what, dtype, job))
    for name, call in _token_ops(job).items():
        yield attempt(name, partial(_token_op, name, call, job))


def _loss(what: str, dtype: str, job: Job) -> Row:
    """Compare the gradients with the reference in float64, and the time with that of three products."""
    import torch
    from bench_ops import LIMITS, fused, make_inputs

    from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens
    from megatron_brorl.ops.reference.linear import linear_ppo_loss

    tokens, width, vocab = LOSS[job.device]
    (hidden, weight, *rest), _ = make_inputs(dtype, (min(tokens, CHECKED), width, vocab), None, job.device)
    fused(hidden, weight, *rest)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    ids, old, rollout, advantages = rest
    shares = torch.full_like(old, 1 / len(old)).double()
    inputs = PolicyTokens(rollout.double(), advantages.double(), shares, old.double())
    settings = PolicyLossSettings(LIMITS[0], LIMITS[1], is_cap=LIMITS[2])
    linear_ppo_loss(exact[0], exact[1], ids, inputs, settings, 1.0).loss.backward()
    pairs = zip((hidden.grad, weight.grad), (x.grad for x in exact), strict=True)
    error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)  # type: ignore[union-attr, operator]

    # The speed, with enough tokens to fill the device.
    del exact, inputs
    large, _ = make_inputs(dtype, (tokens, width, vocab), None, job.device)
    h, w = (x.detach() for x in large[:2])

    def products() -> None:
        logits = torch.mm(h, w.t())
        torch.mm(logits, w)
        torch.mm(logits.t(), h)

    def loss() -> None:
        large[0].grad = large[1].grad = None
        fused(*large)

    base = seconds(products, job)
    taken = seconds(loss, job)
    wrong = f"the error is {error:.2g}" if not error < LOSS_ERROR[dtype] else ""
    return judged(what, wrong, error=error, ms=1e3 * taken, **{"over three products": taken / base})


def _token_ops(job: Job) -> dict[str, Callable[[str, Any], Any]]:
    """Return, by name, a function of an implementation ("fused" or "reference") and of a dtype to tensors."""
    import torch

    from megatron_brorl.algo.advantages import Moments
    from megatron_brorl.ops.backend import backend
    from megatron_brorl.ops.interface import Backend

    device = torch.device(job.device)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4, TOKENS[job.device], generator=generator).to(device)

    def op(call: Callable[[Backend, list[Any]], Any]) -> Callable[[str, Any], Any]:
        def run(name: str, dtype: Any, count: int = TOKENS[job.device]) -> Any:
            return call(backend(name, device), [x[:count].to(dtype, copy=True) for x in table])

        return run

    def starts(x: Any) -> Any:
        return torch.arange(0, len(x) + 1, LENGTH, device=device)

    def value_loss(ops: Backend, x: list[Any]) -> Any:
        x[0].requires_grad_()
        ops.value_loss(x[0], x[1], x[2], (x[3] > 0).to(x[0]), 0.2).loss.backward()
        return x[0].grad

    return {
        "gae": op(lambda ops, x: ops.gae(x[0], x[1], starts(x[0]), gamma=0.99, lam=0.95)[0]),
        "moments": op(lambda ops, x: torch.tensor([ops.moments(x[0]).mean, ops.moments(x[0]).m2])),
        "whiten": op(lambda ops, x: ops.whiten(x[0], Moments(10.0, 0.5, 40.0))),
        "value_loss": op(value_loss),
    }


def _token_op(what: str, run: Callable[..., Any], job: Job) -> Row:
    """Compare 1,024 tokens with the reference in float64, and measure all of them with the copies of the inputs."""
    import torch

    got = run("fused", torch.float32, 2 * LENGTH).double()
    expected = run("reference", torch.float64, 2 * LENGTH).double()
    error = float((got - expected).norm() / expected.norm())
    wrong = f"the error is {error:.2g}" if not error < ERROR else ""
    taken = seconds(lambda: run("fused", torch.float32), job)
    return judged(what, wrong, error=error, tokens=TOKENS[job.device], ms=1e3 * taken)


def seconds(call: Callable[[], Any], job: Job, repeat: int = 5) -> float:
    """Return the median seconds of a call, after one that is not counted."""
    import torch

    found = []
    for _ in range(1 + repeat):
        if not job.dry:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if not job.dry:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


# Stages that train: "train", "n512", "fp8", "vllm" and "trtllm".

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 2816, "context": 512},
    "cpu": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "context": 64},
}
RESPONSE = {"cuda": 128, "cpu": 6}  # tokens, at most
N512 = {"cuda": 512, "cpu": 16}  # rollouts per prompt
GAP = {"bf16": 0.05, "fp32": 1e-3}  # nats: mean difference of log-probabilities between engine and trainer
FP8_GAP = 0.3  # of gradient norms, relative: FP8 has two or three bits of mantissa
RECIPES = ("delayed", "tensorwise", "blockwise")
# The answers of a random model are always wrong, so the reward is a share of letters, which differs within a group.
REWARD = "def score(response, row):\n    return sum(c in 'aeiou' for c in response) / (1 + len(response))\n"
CONFIG = """
[run]
log = []
[model]
path = "{model}"
dtype = "{dtype}"
[data]
train = ["{rows}"]
template = "{{prompt}}="
verifier = "{reward}:score"
[rollout]
prompts = 4
max_tokens = {response}
[reward]
workers = 1
extract = "full"
cut_off_factor = 1.0
[algo]
advantage = "reinforce_pp_baseline"
mini_batches = 2
[optim]
lr = 1e-5
[train]
tokens_per_micro_batch = 16384
[evaluate]
every = 0
"""


def train(job: Job) -> Iterator[Row]:
    """Train with the built-in engine, and resume."""
    yield attempt("two steps", lambda: _run("two steps", job, "train", steps=2))
    yield attempt("resume for a third step", lambda: _run("resume for a third step", job, "train", steps=3))


def n512(job: Job) -> Iterator[Row]:
    """Train a step of N = 512 with the built-in engine."""
    what = f"N = {N512[job.device]}"
    yield attempt(what, lambda: _run(what, job, "n512", 2, [f"rollout.n={N512[job.device]}"]))


def fp8(job: Job) -> Iterator[Row]:
    """Train with every FP8 recipe of Transformer Engine, and compare the first gradient norm with that of bf16."""
    if job.dry or not importlib.util.find_spec("transformer_engine"):
        yield missing("FP8", "no GPU in the dry mode" if job.dry else "pip install 'transformer-engine[pytorch]'")
        return
    base = attempt("bf16", lambda: _run("bf16", job, "fp8_none", steps=2))
    yield base
    for recipe in RECIPES:
        what = f"FP8 {recipe}"
        row = attempt(what, partial(_run, what, job, f"fp8_{recipe}", 2, [f"fp8.recipe={recipe}"]))
        if row["result"] == "ok" and "grad_norm" in base:
            gap = abs(row["grad_norm"] - base["grad_norm"]) / base["grad_norm"]
            wrong = f"the gradient norm differs from that of bf16 by {gap:.0%}" if gap > FP8_GAP else ""
            row = judged(**{"wrong": wrong, **row, "gap": gap, "speedup": base["step s"] / row["step s"]})
        yield row


def vllm(job: Job) -> Iterator[Row]:
    """Train with rollouts of vLLM."""
    yield from _engine("vllm", "vllm", job)


def trtllm(job: Job) -> Iterator[Row]:
    """Train with rollouts of TensorRT-LLM."""
    yield from _engine("trtllm", "tensorrt_llm", job)


def _engine(engine: str, package: str, job: Job) -> Iterator[Row]:
    python = job.pythons.get(engine, sys.executable)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if subprocess.run([python, "-c", look], capture_output=True).returncode:
        yield missing(engine, f"{python} has no {package}; --{engine}-python names another interpreter")
        return
    changes = [f"rollout.engine={engine}", f"engine.python={python}", f"rollout.n={N512[job.device]}"]
    changes += ["engine.cuda_graphs=false"] if job.dry else []
    yield attempt(engine, lambda: _run(engine, job, engine, 2, changes))


def _run(what: str, job: Job, folder: str, steps: int, changes: list[str] | None = None) -> Row:
    """Run `brorl train` up to a number of steps, and return a row with the metrics of the first and the last step."""
    dtype = "fp32" if job.dry else "bf16"
    scratch = Path(job.scratch)
    config, run, model, rows = (scratch / x for x in ("run.toml", folder, "model", "rows.jsonl"))
    if not config.exists():
        sums = [{"prompt": f"{i}+{j}", "answer": str(i + j)} for i in range(20) for j in range(20)]
        rows.write_text("".join(json.dumps(x) + "\n" for x in sums), encoding="utf-8")
        (scratch / "reward.py").write_text(REWARD, encoding="utf-8")
        text = CONFIG.format(
            reward=scratch / "reward.py", model=model, dtype=dtype, rows=rows, response=RESPONSE[job.device]
        )
        config.write_text(text, encoding="utf-8")
        _make_model(config, model, job)
    settings = [f"run.dir={run}", f"train.steps={steps}", "rollout.n=16", *(changes or [])]
    command = [sys.executable, "-m", "megatron_brorl", "train", str(config), *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        return judged(what, f"exit code {done.returncode}: {said[-1]}")

    # Every run must have finite updates, and engine and trainer must agree on log-probabilities.
    found = [json.loads(x) for x in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [row for row in found if "loss" in row]
    first, last = found[0], found[-1]
    gap = max(row["logprob_gap_mean"] for row in found)
    wrong = ""
    if last["step"] != steps - 1:
        wrong = f"the last step is {last['step']} instead of {steps - 1}"
    elif any(not row["updates"] or row["updates_skipped"] or not math.isfinite(row["grad_norm"]) for row in found):
        wrong = "an update was skipped, or there was none"
    elif not gap < GAP[dtype]:
        wrong = f"log-probabilities of engine and trainer differ by {gap:.3g} nats"
    metrics = {
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "log-prob gap": gap,
        "step s": last["time"]["step"],
    }
    return judged(what, wrong, **metrics, **{"tokens/s": last["time"]["throughput/tokens_per_s"]})


def _make_model(config: Path, directory: Path, job: Job) -> None:
    from make_tiny_model import make

    from megatron_brorl.config.load import load

    make(load(str(config), []), directory, vocab=128, **SIZES[job.device])


STAGES = {x.__name__: x for x in (build, ops, train, n512, fp8, vllm, trtllm)}


def main() -> None:
    """Run one stage."""
    stage, job, rows = sys.argv[1:]
    told = Job(**json.loads(Path(job).read_text(encoding="utf-8")))
    with open(rows, "a", encoding="utf-8") as file:
        for row in STAGES[stage](told):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
