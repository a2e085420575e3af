"""(d) A step of training: shared prompts and offload change speed and memory, not the loss; a resumed one goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from bench_common import alone, write_model

from gpu_stages.common import Job, Row, apart, attempt, judged
from gpu_stages.training import Case, make_experience, make_worker, measured, take
from megatron_brorl.checkpoints import training as checkpoints
from megatron_brorl.ops.checksum import checksum
from megatron_brorl.parallel import grid

CASES = {
    "a prompt in every row": Case(share_prompt=False),
    "one copy of the prompt": Case(share_prompt=True),
    "one copy of the prompt, offload": Case(share_prompt=True, offload=True),
}
GAP = {"bf16": 0.03, "fp32": 1e-3}  # of gradient norms, relative; a tenth of it in nats, of losses
SMALL = {"cuda": "m30", "cpu": "t4"}  # of the resumed run: what a checkpoint holds does not depend on the size
RESUMED_GAP = 1e-3  # where kernels do not repeat themselves bit for bit


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    first: dict[str, Any] = {}
    for name, case in CASES.items():
        yield attempt(f"step, {name}", partial(_step, f"step, {name}", case, first, job))
    yield attempt("resume", lambda: alone(resumed, "resume", job))


def _step(what: str, case: Case, first: dict[str, Any], job: Job) -> Row:
    """Against the first case that could be run."""
    found = alone(measured, job, case)
    wrong = compared(found, first or found, GAP[job.dtype])
    first.update({} if first else found)
    return judged(what, wrong, **found)


def compared(found: dict[str, Any], other: dict[str, Any], gap: float) -> str:
    """What of loss and gradient norm is not that of another case, within `gap`; "" where nothing."""
    if found["skipped"]:
        return f"{found['skipped']:.0f} updates were skipped: gradients are not finite"
    if apart(found["grad norm"], other["grad norm"]) > gap:
        return f"its gradient norm is {found['grad norm']:.6g}, that of the first case {other['grad norm']:.6g}"
    if abs(found["loss"] - other["loss"]) > gap / 10:
        return f"its loss is {found['loss']:.6g}, that of the first case {other['loss']:.6g}"
    return ""


def resumed(args: tuple[str, Job]) -> Row:
    """A step, a checkpoint, a step; and that step again from the checkpoint. To be called in a fresh process."""
    what, job = args
    with TemporaryDirectory(dir=job.scratch) as folder:
        name = SMALL[job.device]
        write_model(name, Path(folder, "model"))
        case = Case(share_prompt=True, model=f"{folder}/model")

        # The run that nobody stops, which leaves a checkpoint after its first step.
        worker = make_worker(job, case)
        experience = make_experience(job, worker)
        take(worker, experience, 0)
        part = checkpoints.Part("", worker.actor, worker.optimizer)
        saved = checkpoints.save(Path(folder, "checkpoints"), 1, [part], {}, 1)
        straight, weights = take(worker, experience, 1), _sums(worker)

        # Another worker, which knows nothing but the checkpoint.
        other = make_worker(job, case)
        checkpoints.load(saved, [checkpoints.Part("", other.actor, other.optimizer)])
        again = take(other, experience, 1)
        same = _sums(other) == weights

    gaps = {key: apart(straight[key], again[key]) for key in ("loss", "grad_norm")}
    wrong = ", ".join(f"{key} is apart by {gap:.2g}" for key, gap in gaps.items() if gap > RESUMED_GAP)
    grid.leave()
    bits = "the same bits" if same else "other bits"
    return judged(what, wrong, model=name, weights=bits, loss=again["loss"], **{"grad norm": again["grad_norm"]})


def _sums(worker: Any) -> list[int]:
    """Checksums of the weights."""
    with torch.no_grad():
        return [int(checksum(name, tensor)) for name, tensor in worker.hf_tensors()]
