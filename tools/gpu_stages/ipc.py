"""(e) Weights from one process to another on the same machine: CUDA IPC on a GPU, shared host memory on a CPU.

Sender and reader are those of a run with an engine in another process. The second update has a checksum that is wrong,
which the reader must find.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_common import DTYPES

from gpu_stages.common import LARGE, SMALL, Job, Row, attempt, judged, wait
from megatron_brorl.model_shape import parse_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.protocol import WorkerBucket
from megatron_brorl.rollout.remote.weights_receive import BucketReader, mapped, own_device, view
from megatron_brorl.rollout.remote.weights_send import HostWeights, IpcSender, allocate, layout

Named = list[tuple[str, torch.Tensor]]
ANSWER_S = 240.0  # for one bucket


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    way = "shared host memory" if job.dry else "CUDA IPC"
    for faulty in (False, True):
        what = f"weights by {way}, {'one of them spoiled' if faulty else 'as they are'}"
        yield attempt(what, partial(_send, what, faulty, job))


def _send(what: str, faulty: bool, job: Job) -> Row:
    """All tensors of the model to a process of its own, which checks each and that none is missing."""
    shape = parse_shape(SMALL if job.dry else LARGE, "gpu_check")
    generator = torch.Generator(job.device).manual_seed(0)
    dtype = DTYPES[job.dtype]
    weights = [
        (name, torch.randn(size, generator=generator, device=job.device, dtype=torch.float32).to(dtype))
        for name, size in hf_shapes(shape).items()
    ]
    size = sum(x.nbytes for _, x in weights)

    # A fresh process: a fork of one that has used CUDA could not use it.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    uuid = "cpu" if job.dry else own_device()
    reader = context.Process(target=read, args=(there, uuid, [name for name, _ in weights]), daemon=True)
    reader.start()
    there.close()
    try:
        _answer(here)  # it is up
        wait(job.device)
        begun = time.perf_counter()
        said = (_by_host if job.dry else _by_handles)(weights, here, faulty, uuid, job)
        taken = time.perf_counter() - begun
    finally:
        here.close()
        reader.join(10)
        reader.kill()

    # The reader's own words are the result.
    if faulty:
        return judged(what, "" if "checksum" in said else f"the reader said {said or 'nothing'!r}", said=said)
    return judged(what, said, tensors=len(weights), MiB=size / 2**20, seconds=taken, **{"GB/s": size / taken / 1e9})


def _by_handles(weights: Named, here: Connection, faulty: bool, uuid: str, job: Job) -> str:
    """Bucket by bucket as IpcSender makes them; what the reader found wrong."""
    said = ""

    def send(bucket: WorkerBucket) -> None:
        nonlocal said
        given: Any = bucket["records"]
        here.send({**bucket, "records": [_spoiled(r) if faulty and not i else r for i, r in enumerate(given)]})
        said = _answer(here)
        if said:
            raise RuntimeError(said)

    sender = IpcSender(uuid, send, lambda name, tensor: iter([(name, tensor)]))
    for _ in sender.tee(weights):
        pass
    return said or _end(here)


def _by_host(weights: Named, here: Connection, faulty: bool, uuid: str, job: Job) -> str:
    """One file in memory, bucket by bucket; what the reader found wrong."""
    by_name = dict(weights)
    shapes = {name: tuple(x.shape) for name, x in weights}
    records, size = layout(shapes, weights[0][1].dtype, lambda name, x: iter([(name, x)]))
    path = Path(job.scratch, "weights_in_memory")
    path.unlink(missing_ok=True)
    allocate(path, size)
    memory = mapped(path)
    for i, record in enumerate(records):
        view(memory, record).copy_(by_name[record.name])
        sealed = record._replace(checksum=int(checksum(record.name, by_name[record.name])))
        records[i] = _spoiled(sealed) if faulty and not i else sealed

    host = HostWeights(path, 0, tuple(records))
    try:
        for bucket in host.buckets():
            here.send({"path": str(path), "records": bucket})
            if said := _answer(here):
                return said
        return _end(here)
    finally:
        host.delete()


def _spoiled(record: Any) -> Any:
    """With a checksum that is another tensor's."""
    return record._replace(checksum=record.checksum ^ 1)


def _answer(here: Connection) -> str:
    """What the reader says; "" where all is well."""
    if not here.poll(ANSWER_S):
        return f"no answer within {ANSWER_S:.0f} s"
    try:
        return str(here.recv())
    except EOFError:
        return "the reader ended without a word"


def _end(here: Connection) -> str:
    here.send(None)
    return _answer(here)


def read(there: Connection, uuid: str, names: list[str]) -> None:
    """The reader's process: takes buckets until None, and answers each with what is wrong, or ""."""
    reader = BucketReader(0, uuid)
    if reader.device.type == "cuda":
        torch.zeros((), device=reader.device)  # what starting CUDA takes is no part of the figure
    there.send("")
    try:
        while (bucket := there.recv()) is not None:
            reader.read(bucket)
            if reader.device.type == "cuda":
                torch.cuda.synchronize()
            there.send("")
        reader.check_complete(names)
        there.send("")
    except EOFError:  # the sender has seen enough
        return
    except (ValueError, RuntimeError) as e:
        there.send(str(e) or type(e).__name__)
