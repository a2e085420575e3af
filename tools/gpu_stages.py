"""The stages of tools/gpu_check.py: python tools/gpu_stages.py STAGE JOB.json ROWS.jsonl

Every row is written as soon as it is known, so that a crash or a kill loses no earlier row. Models have random weights.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

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


# Operations.

CHECKED = 1024  # maximum number of tokens that are compared with float64
TOKENS = {"cuda": 1 << 24, "cpu": 1 << 12}  # number of tokens for the ops over tokens
LENGTH = 512  # tokens of a segment of `gae`
LOSS_ERROR = {"bf16": 2e-2, "fp32": 1e-5}  # relative error of the gradients, in the Euclidean norm
ERROR = 1e-5  # relative error of the ops over tokens, in float32


def loss(index: int, job: Job) -> Iterator[Row]:
    """Compare the fused loss with float64 and with the time of three products. index: position in bench_ops.SHAPES."""
    from bench_ops import SHAPES

    shape = (64, 32, 1031) if job.dry else SHAPES[index]  # tokens, hidden size, vocabulary
    dtypes = ("fp32",) if job.dry else ("bf16", "fp32")
    for dtype in dtypes:
        what = f"linear_ppo_loss {dtype}, V {shape[2]:,}"
        yield attempt(what, partial(_loss, what, dtype, shape, job))


def _loss(what: str, dtype: str, shape: tuple[int, int, int], job: Job) -> Row:
    """Compare the gradients of CHECKED tokens with the reference in float64, and measure all tokens."""
    import torch
    from bench_ops import LIMITS, fused, make_inputs, measure

    from megatron_brorl.algo.policy_loss import PolicyLossSettings, PolicyTokens
    from megatron_brorl.ops.reference.linear import linear_ppo_loss

    checked_shape = (min(shape[0], CHECKED), *shape[1:])
    (hidden, weight, *rest), _ = make_inputs(dtype, checked_shape, clipped=None, device=job.device)
    fused(hidden, weight, *rest)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    ids, old, rollout, advantages = rest
    token_weights = torch.full_like(old, 1 / len(old)).double()
    policy_tokens = PolicyTokens(rollout.double(), advantages.double(), token_weights, old.double())
    settings = PolicyLossSettings(eps_low=LIMITS[0], eps_high=LIMITS[1], is_cap=LIMITS[2])
    linear_ppo_loss(exact[0], exact[1], ids, policy_tokens, settings, temperature=1.0).loss.backward()
    pairs = zip((hidden.grad, weight.grad), (x.grad for x in exact), strict=True)
    error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)  # type: ignore[union-attr, operator]
    del hidden, weight, exact, policy_tokens

    # The arguments of `measure`: implementation, dtype, shape, share of clipped tokens, device, threads, calls.
    products_row, fused_row = (
        measure((name, dtype, shape, 0.0, job.device, torch.get_num_threads(), 5)) for name in ("products", "fused")
    )
    wrong = f"the error is {error:.2g}" if not error < LOSS_ERROR[dtype] else ""
    ratio = {"over three products": fused_row["seconds"] / products_row["seconds"]}
    return judged(what, wrong, error=error, ms=1e3 * fused_row["seconds"], **ratio, MiB=fused_row["extra_mib"])


def tokens(job: Job) -> Iterator[Row]:
    """Compare each op over tokens with float64 on the same device, and measure its speed."""
    import torch

    from megatron_brorl.algo.advantages import Moments
    from megatron_brorl.ops.backend import Backend

    table = torch.randn(4, TOKENS[job.device], generator=torch.Generator().manual_seed(0)).to(job.device)
    table[3] = (table[3] > 0).float()  # the weights of value_loss

    def moments(ops: Backend, x: list[Any]) -> Any:
        moments_of_x = ops.moments(x[0])
        return torch.tensor([moments_of_x.mean, moments_of_x.m2])

    def gae(ops: Backend, x: list[Any]) -> Any:
        starts = torch.arange(0, len(x[0]) + 1, LENGTH, device=job.device)
        return ops.gae(x[0], x[1], starts, gamma=0.99, lam=0.95)[0]

    def whiten(ops: Backend, x: list[Any]) -> Any:
        return ops.whiten(x[0], Moments(count=10.0, mean=0.5, m2=40.0))

    def value_loss(ops: Backend, x: list[Any]) -> Any:
        values = x[0].detach().requires_grad_()
        ops.value_loss(values, old_values=x[1], returns=x[2], weights=x[3], clip=0.2).loss.backward()
        return values.grad

    for op in (gae, moments, whiten, value_loss):
        yield attempt(op.__name__, partial(_token_op, op, table, job))


def _token_op(op: Callable[..., Any], table: Any, job: Job) -> Row:
    """Compare CHECKED tokens with the reference in float64, and measure all tokens."""
    import torch
    from measure import timed

    from megatron_brorl.ops.backend import backend

    fused, reference = (backend(name, torch.device(job.device)) for name in ("fused", "reference"))
    few = table[:, :CHECKED]
    expected = op(reference, list(few.double()))
    error = float((op(fused, list(few)).double() - expected).norm() / expected.norm())
    wrong = f"the error is {error:.2g}" if not error < ERROR else ""
    seconds = [timed(lambda: op(fused, list(table)), job.device)[0] for _ in range(6)]
    return judged(op.__name__, wrong, error=error, tokens=table.shape[1], ms=1e3 * statistics.median(seconds[1:]))


# Models.

GAP = {"bf16": 0.05, "fp32": 1e-3}  # nats: mean difference of log-probabilities between engine and trainer


class Sizes(NamedTuple):
    """Sizes of a step."""

    groups: int  # prompts
    n: int  # rollouts of each prompt
    prompt: int  # tokens
    response: int  # tokens


def _step_job(model: str, sizes: Sizes, job: Job, dtype: str = "bf16", steps: int = 2) -> tuple[dict[str, Any], Path]:
    """Return a job of bench_step, and a new folder for its run. The model is written if no stage did it before."""
    import bench_step
    from bench_common import DTYPES, MODELS, write_model

    if job.dry:
        model, sizes, dtype = "t4", Sizes(groups=2, n=16, prompt=8, response=16), "fp32"
    directory = Path(job.scratch, model)
    if not directory.exists():
        unfinished = Path(f"{directory}.part")  # remains if the stage is killed
        write_model(model, unfinished, DTYPES["fp32" if job.dry else "bf16"])
        bench_step.write_tokenizer(MODELS[model]["vocab_size"], unfinished)
        unfinished.rename(directory)
    common = {"device": job.device, "threads": os.cpu_count(), "trl_micro_batch": 64, "tokens_per_micro_batch": 16384}
    args = argparse.Namespace(groups=sizes.groups, n=sizes.n, response=sizes.response, repeat=steps - 1, **common)
    return bench_step.make_job(args, directory, sizes.prompt, dtype), Path(tempfile.mkdtemp(dir=job.scratch))


def _run(what: str, step_job: dict[str, Any], folder: Path, *overrides: str) -> Row:
    """Return the row of a run of bench_step, with the times of the last step. No update may be skipped."""
    from bench_step import ours

    report = ours(step_job, folder, *overrides)
    last = report["steps"][-1]
    gap = max(step["logprob_gap_mean"] for step in report["steps"])
    wrong = "" if gap < GAP[step_job["dtype"]] else f"log-probabilities of engine and trainer differ by {gap:.3g} nats"
    if any(not step["updates"] or step["updates_skipped"] for step in report["steps"]):
        wrong = "an update was skipped, or there was none"
    phases = {f"{phase} s": last[phase] for phase in ("generate", "train", "weight_sync")}
    rate = {"generated tokens/s": last["tokens"] / last["generate"], "MiB": report["peak_mib"]}
    return judged(what, wrong, s=last["step"], **phases, **rate, gap=gap)


def step(what: str, model: str, sizes: Sizes, job: Job) -> Iterator[Row]:
    """Measure the second step of a run with the built-in engine and one update."""
    yield _run(what, *_step_job(model, sizes, job))


def remote_step(engine: str, package: str, size: int, job: Job) -> Iterator[Row]:
    """Measure the second step of a run on `size` GPUs with another engine, which uses two GPUs if there are several."""
    if not _has(python := job.pythons.get(engine, sys.executable), package):
        yield missing(engine, f"{python} has no {package}; --{engine}-python names another interpreter")
        return
    overrides = [f"rollout.engine={engine}", f"engine.python={python}"]
    overrides += [f"engine.cuda_graphs={str(not job.dry).lower()}"]
    overrides += ["--processes", str(size), "engine.tensor=2"] if size > 1 else []
    step_job, folder = _step_job("1.5b", Sizes(groups=4, n=512, prompt=128, response=128), job)
    yield _run(f"{engine}, {size} GPUs", step_job, folder, *overrides)


def _has(python: str, package: str) -> bool:
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return not subprocess.run([python, "-c", program], capture_output=True).returncode


def on_all_gpus(stage: Callable[[int, Job], Iterator[Row]], job: Job) -> Iterator[Row]:
    """Run a stage on all GPUs, at least two; in the dry mode on two processes."""
    import torch

    size = 2 if job.dry else torch.cuda.device_count()
    yield from (stage(size, job) if size > 1 else [missing("GPUs", "a second one")])


def nccl(size: int, job: Job) -> Iterator[Row]:
    """Measure the bus bandwidth of an all-reduce of 1 GiB, as nccl-tests does."""
    with concurrent.futures.ProcessPoolExecutor(size, multiprocessing.get_context("spawn")) as pool:
        bandwidth = min(pool.map(partial(_all_reduce, size, job), range(size)))
    yield judged(f"all-reduce, {size} GPUs", wrong="", **{"GB/s": bandwidth})


def _all_reduce(size: int, job: Job, rank: int) -> float:
    import torch
    import torch.distributed as dist
    from measure import timed

    torch.cuda.set_device(-1 if job.dry else rank)  # -1 does nothing
    dist.init_process_group(init_method=f"file://{job.scratch}/all_reduce", rank=rank, world_size=size)
    x = torch.zeros(1 << (18 if job.dry else 28), device=job.device)  # on a GPU 2^28 x 4 bytes = 1 GiB
    seconds = min(timed(lambda: dist.all_reduce(x), job.device)[0] for _ in range(6))
    return 2e-9 * (size - 1) / size * x.nbytes / seconds  # GB/s: a ring sends 2 (size - 1) / size of x per rank


def lost_rank(size: int, job: Job) -> Iterator[Row]:
    """Kill rank 1 and resume; stop rank 1, so that rank 0 fails and names it; resume to the end."""
    from bench_step import settings

    timeout_s = 15 if job.dry else 60
    changes = ["train.checkpoint_every=1", f"parallel.timeout_s={timeout_s}", f"rollout.timeout_s={timeout_s}"]
    run_settings = settings(*_step_job("135m", Sizes(groups=4, n=64, prompt=64, response=64), job, steps=6))
    command = [sys.executable, "-m", "megatron_brorl", "train", *run_settings, "--processes", str(size), *changes]
    # Gloo's barrier names rank 1. On GPUs the report of stalls does. A run without an expected error must succeed.
    stalled = "waited for rank 1" if job.dry else "rank 1 ("
    for sent, expected in ((signal.SIGKILL, "rank 1 was ended"), (signal.SIGSTOP, stalled), (signal.SIGCONT, "")):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            output = next(line for line in run.stdout or () if "reward" in line)  # after the first step of the run
            ranks = {child.environ()["RANK"]: child for child in psutil.Process(run.pid).children()}
            ranks["1"].send_signal(sent)
            output += run.communicate()[0]
        is_expected = expected in output and (run.returncode == 0) == (not expected)
        yield judged(f"rank 1 gets {sent.name}", "" if is_expected else output[-300:])


def trl(job: Job) -> Iterator[Row]:
    """Measure a step of TRL with transformers' generation, and the same step of this project."""
    from measure import ask

    if not _has(python := job.pythons.get("trl", sys.executable), "trl"):
        yield missing("TRL", f"{python} has no trl; --trl-python names another interpreter")
        return
    step_job, folder = _step_job("135m", Sizes(groups=4, n=512, prompt=64, response=128), job)
    ours = _run("step 135m", step_job, folder)
    yield ours
    seconds = ask(python, "trainer_trl.py", step_job, folder)["steps"][-1]["step"]
    yield judged("TRL", wrong="", s=seconds, times=seconds / ours["s"])


def resume(job: Job) -> Iterator[Row]:
    """Compare the weights of a run of four steps with those of one that stopped after two and was resumed."""
    step_job, folder = _step_job("135m", Sizes(groups=4, n=64, prompt=64, response=64), job, steps=4)

    def weights_hash() -> str:
        return hashlib.sha256((folder / "run" / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]

    yield _run("four steps", step_job, folder)
    undisturbed = weights_hash()
    shutil.rmtree(folder / "run")
    yield _run("two steps", step_job, folder, "train.steps=2")
    row = _run("resume to four steps", step_job, folder) | {"sha256": undisturbed}
    if weights_hash() != undisturbed:
        row["result"] = "failed: the weights differ from those of the undisturbed run"
    yield row


def quickstart(job: Job) -> Iterator[Row]:
    """Measure the run of examples/smollm2/run.sh. MODEL names the converted model, as there."""
    from bench_common import train

    example = ROOT / "examples" / "smollm2"
    model = Path(os.environ.get("MODEL", ROOT / "runs" / "smollm2-135m"))
    if not model.exists():
        yield missing("quickstart", f"{model}; examples/smollm2/run.sh converts the model, and MODEL=DIR names it")
        return
    data, run = (Path(tempfile.mkdtemp(dir=job.scratch)) for _ in range(2))
    begun = time.perf_counter()
    subprocess.run([sys.executable, str(example / "sums.py"), str(data)], check=True)
    settings = [str(example / "sums.toml"), f"model.path={model}", f"run.dir={run}"]
    settings += [f'data.{name}=["{data}/{name}.jsonl"]' for name in ("train", "held_out")]
    settings += ["rollout.n=4", "algo.dynamic_sampling=false", "data.held_out=[]", "train.steps=2"] if job.dry else []
    report = train(run, settings, os.cpu_count() or 1)
    first, *later = (step["step"] for step in report["steps"])
    times = {"job s": report["job_seconds"], "with start s": time.perf_counter() - begun}
    yield judged("quickstart", wrong="", **{"first s": first, "later s": statistics.median(later)}, **times)


def engine(name: str, prompt: int, response: int, job: Job) -> Iterator[Row]:
    """Measure the built-in engine with 4 prompts x 512 rollouts, and compare tokens between two batches."""
    import torch
    from bench_common import DTYPES
    from bench_rollout import prompts
    from safetensors.torch import load_file

    from megatron_brorl.families.shape import WEIGHTS, read_shape
    from megatron_brorl.models.weights.names import hf_shapes
    from megatron_brorl.ops.backend import backend
    from megatron_brorl.rollout.engine import Request, Sampling
    from megatron_brorl.rollout.native.torch_engine import TorchEngine
    from megatron_brorl.types import Prompt

    step_job, _ = _step_job(name, Sizes(groups=4, n=512, prompt=prompt, response=response), job)
    shape, n, dtype = read_shape(step_job["model"]), step_job["n"], DTYPES[step_job["dtype"]]
    device = torch.device(job.device)
    ops = backend("fused", device)
    native = TorchEngine(shape, hf_shapes(shape), device, dtype, 4 * n, sample=ops.sample_tokens, ops=ops.decode)
    native.update_weights(load_file(f"{step_job['model']}/{WEIGHTS}").items(), version=0)
    prompt_ids = prompts(shape.vocab, prompt, calls=8)

    def generate(keys: list[int], tokens: int) -> dict[int, list[Any]]:
        requests = [
            Request(Prompt(str(key), text="", token_ids=tuple(prompt_ids[key]), answer=None, verifier="exact"), key, n)
            for key in keys
        ]
        # No response ends early, because the stop token is outside the vocabulary.
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, stop_ids=(shape.vocab,))
        groups = native.generate(requests, sampling)
        return {key: [x.token_ids for x in group] for key, group in zip(keys, groups, strict=True)}

    first = generate([0, 1, 2, 3], tokens=16)
    begun = time.perf_counter()
    count = sum(len(x) for group in generate([4, 5, 6, 7], step_job["response"]).values() for x in group)
    yield judged(f"engine {name}", wrong="", **{"tokens/s": count / (time.perf_counter() - begun)})

    again = generate([5, 2, 6, 0], tokens=16)
    equal = all(torch.equal(x, y) for key in (0, 2) for x, y in zip(first[key], again[key], strict=True))
    yield judged(f"engine {name}, tokens", "" if equal else "a rollout depends on the other rollouts of its batch")


def update(variant: str, te: bool, job: Job) -> Iterator[Row]:
    """Measure an update of the 1.5B model with 64 responses of 512 tokens to a prompt of 512 tokens."""
    what = f"update {variant} with{'' if te else 'out'} Transformer Engine"
    if te and (job.dry or not importlib.util.find_spec("transformer_engine")):
        yield missing(what, "a GPU" if job.dry else "pip install 'transformer-engine[pytorch]'")
        return
    from bench_update import measure

    step_job, _ = _step_job("1.5b", Sizes(groups=1, n=64, prompt=512, response=512), job)
    row = measure(({**step_job, "variant": variant, "without_te": not te},))
    yield judged(what, wrong="", s=row["seconds"], MiB=row["peak_mib"])


def profile(model: str, sizes: Sizes, dtype: str, overrides: Sequence[str], job: Job) -> Iterator[Row]:
    """Count the launches of a run's second step, and list the kernels and CPU operations that take most time."""
    import torch
    from bench_step import settings
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    import megatron_brorl

    # The engine runs in a thread of its own.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU] if job.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities, experimental_config=threads)
    seconds = []

    class ProfileSecondStep:
        def on_step(self, number: int, metrics: Any) -> None:
            if number == 0:
                profiler.start()
            seconds.append(time.perf_counter())
            if number == 1:
                profiler.stop()

    config, *changes = settings(*_step_job(model, sizes, job, dtype))
    megatron_brorl.train(config, overrides=[*changes, *overrides], callbacks=[ProfileSecondStep()])
    events = [x for x in profiler.key_averages() if not x.is_user_annotation]
    kernels = [(x.self_device_time_total / 1e3, x) for x in events if x.device_type != DeviceType.CPU]
    calls = [(x.self_cpu_time_total / 1e3, x) for x in events if x.device_type == DeviceType.CPU]
    step_ms = 1e3 * (seconds[1] - seconds[0])

    def longest(timed: list[tuple[float, Any]]) -> list[str]:
        return [f"{ms:.1f} ms, {x.count} x {x.key[:60]}" for ms, x in sorted(timed, key=lambda y: -y[0])[:10]]

    parts = {"launches": "Launch", "synchronizations": "Synchronize"}  # of the names of CUDA's functions
    counts = {key: sum(x.count for _, x in calls if x.key[:2] == "cu" and part in x.key) for key, part in parts.items()}
    times = {"profiled seconds": step_ms / 1e3, "GPU busy": sum(ms for ms, _ in kernels) / step_ms}
    yield judged(f"profile {model}", wrong="", **counts, **times, kernels=longest(kernels), operations=longest(calls))


QUICKSTART = ("algo.mini_batches=4", "algo.mini_batch_of=siblings", "algo.old_log_probs=rollout")
# Each stage with its limit in seconds. Positional arguments: model, prompt and response tokens of `engine`; index
# in SHAPES of `loss`; variant and use of Transformer Engine of `update`; engine, package and GPUs of `remote_step`.
STAGES: dict[str, tuple[Callable[[Job], Iterator[Row]], float]] = {
    "quickstart": (quickstart, 100),
    "engine_135m": (partial(engine, "135m", 64, 128), 60),
    "engine_1.5b": (partial(engine, "1.5b", 512, 512), 170),
    "loss_1.5b": (partial(loss, 5), 60),
    "loss_135m": (partial(loss, 6), 60),
    "tokens": (tokens, 60),
    "resume": (resume, 120),
    "step_32x16": (partial(step, "step 1.5b, 32 x 16", "1.5b", Sizes(groups=32, n=16, prompt=128, response=384)), 120),
    "step_1x512": (partial(step, "step 1.5b, 1 x 512", "1.5b", Sizes(groups=1, n=512, prompt=128, response=384)), 120),
    "update_shared": (partial(update, "shared", False), 60),
    "update_full": (partial(update, "full", False), 60),
    "update_te_shared": (partial(update, "shared", True), 60),
    "update_te_full": (partial(update, "full", True), 60),
    "update_te_fp8": (partial(update, "fp8:delayed", True), 60),
    "profile_135m": (partial(profile, "135m", Sizes(groups=4, n=512, prompt=40, response=6), "fp32", QUICKSTART), 60),
    "profile_1.5b": (partial(profile, "1.5b", Sizes(groups=32, n=16, prompt=128, response=16), "bf16", ()), 90),
    "trl": (trl, 150),
    "vllm": (partial(remote_step, "vllm", "vllm", 1), 180),
    "trtllm": (partial(remote_step, "trtllm", "tensorrt_llm", 1), 300),
    "nccl": (partial(on_all_gpus, nccl), 60),
    "lost_rank": (partial(on_all_gpus, lost_rank), 400),
    "vllm_tp2": (partial(on_all_gpus, partial(remote_step, "vllm", "vllm")), 240),
    "trtllm_tp2": (partial(on_all_gpus, partial(remote_step, "trtllm", "tensorrt_llm")), 400),
}


def main() -> None:
    """Run one stage."""
    stage, job_path, rows_path = sys.argv[1:]
    job = Job(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    with open(rows_path, "a", encoding="utf-8") as file:
        for row in STAGES[stage][0](job):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
