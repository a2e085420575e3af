"""Tests of weight sync to engines on the fake tensorrt_llm."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from contract.engines import draw, same

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.fp8_blocks import dequantize, quantize
from megatron_brorl.rollout.remote.weights_send import NodeRanks
from megatron_brorl.rollout.weight_receiver import UpdateRefused

pytestmark = pytest.mark.slow  # see test_trtllm_engine.py


def broken(model, what):
    pairs = list(model.stream())
    if what == "missing":
        return pairs[:-1]
    name, tensor = pairs[3]
    pairs[3] = ChecksummedTensor(name, tensor.clone().fill_(1.0), pairs[3].checksum)
    return pairs


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_faulty_update_leaves_the_engine_unchanged(what, model, start):
    engine = start()
    engine.update_weights(model.stream(), 0)
    before, pid = draw(engine), engine.supervisor.pid
    with pytest.raises(UpdateRefused):
        engine.update_weights(broken(model, what), 1)
    assert engine.version == 0
    assert same(draw(engine), before)
    assert engine.supervisor.pid == pid


def test_worker_detects_damage_in_shared_memory(model, start, capfd):
    """The file changes after the trainer's check. The engine never generates with the damaged weights."""
    engine = start(config={"max_restarts": 1})
    engine.update_weights(model.stream(), 0)
    stage = engine._write_update

    def spoiled(tensors, version):
        weights = stage(tensors, version)
        with open(weights.path, "r+b") as file:
            file.seek(weights.records[7].offset + 5)
            file.write(b"\x55")
        return weights

    engine._write_update = spoiled
    with pytest.raises(UpdateRefused, match=r"does not match its checksum"):
        engine.update_weights(model.stream(0.5), 1)
    with pytest.raises(UserError, match="gave up"):
        draw(engine)


def test_fp8_weights_equal_the_quantized_model(model, start):
    engine = start(config={"quantization": "fp8", "cuda_graphs": True})
    engine.update_weights(model.stream(), 0)
    rollouts = draw(engine)
    exact = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    try:
        for name, p in model.module.named_parameters():
            if name.endswith("_proj.weight"):
                p.data = dequantize(*quantize(p.data))
        for rollout in rollouts:
            torch.testing.assert_close(rollout.log_probs, model.log_probs(rollout), atol=2e-5, rtol=0)
    finally:
        for name, p in model.module.named_parameters():
            p.data = exact[name]
    assert any(not torch.allclose(r.log_probs, model.log_probs(r), atol=1e-3) for r in rollouts)


def test_engines_of_a_node_share_one_file(model, start):
    """Two ranks with one engine each write one file together, from which a killed engine is restarted."""
    barrier, given = threading.Barrier(2), [None, None]

    def exchange(i, own):
        given[i] = own
        barrier.wait(60)
        found = list(given)
        barrier.wait(60)
        return found

    engines = [start(), start()]
    for i, engine in enumerate(engines):
        engine.node = NodeRanks(i, 2, partial(exchange, i))
    for version in range(2):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda e, v=version: e.update_weights(model.stream(1 + v), v), engines))
        assert {engine.supervisor.weights.path for engine in engines} == {engines[0].folder / f"weights_{version}"}
        assert not list(engines[1].folder.glob("weights_*"))
    expected = draw(engines[0])
    assert same(draw(engines[1]), expected)
    engines[0].supervisor.sleep()
    os.kill(engines[1].supervisor.pid, signal.SIGKILL)
    assert same(draw(engines[1]), expected)
