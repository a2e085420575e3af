"""Tests that faults in a weight update are detected and leave the engine unchanged."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import tiny
import torch
from checksums import with_checksums

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.weight_stream import UpdateRefused, receive
from megatron_brorl.types import Prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, dict(tiny.make_model(directory, "qwen2", True).named_parameters())


def dropped(pairs):
    """Drop a bucket of three tensors."""
    return [*pairs[:4], *pairs[7:]]


def swapped(pairs, with_checksums):
    """Swap the bytes of k and v of one layer, which have the same shape."""
    k, v = (
        next(i for i, p in enumerate(pairs) if p[0] == f"model.layers.1.self_attn.{x}.weight")
        for x in ("k_proj", "v_proj")
    )
    a, b = pairs[k], pairs[v]
    first, second = (b.checksum, a.checksum) if with_checksums else (a.checksum, b.checksum)
    pairs[k], pairs[v] = ChecksummedTensor(a[0], b[1], first), ChecksummedTensor(b[0], a[1], second)
    return pairs


def flipped(pairs):
    """Flip one bit of one tensor after its checksum was computed."""
    name, tensor = pairs[5]
    data = tensor.detach().clone()
    data.view(torch.uint8).view(-1)[17] ^= 4
    pairs[5] = ChecksummedTensor(name, data, pairs[5].checksum)
    return pairs


def renamed(pairs):
    return [ChecksummedTensor("model.other", *pairs[0][1:], pairs[0].checksum), *pairs[1:]]


def cut(pairs):
    return [ChecksummedTensor(pairs[0][0], pairs[0][1][:-1], pairs[0].checksum), *pairs[1:]]


def killed(pairs):
    yield from pairs[:6]
    raise RuntimeError("Connection closed by peer")


SWAPPED = r"2 tensors do not match their checksums, for example model.layers.1.self_attn.k_proj.weight"
FAULTS = [
    (dropped, "3 tensors missing, for example model.layers.0.self_attn"),
    (partial(swapped, with_checksums=False), SWAPPED),
    (partial(swapped, with_checksums=True), SWAPPED),
    (flipped, r"1 tensors do not match their checksums"),
    (renamed, "model.other is unknown"),
    (cut, r"model.embed_tokens.weight has shape \[102, 48\]"),
    (lambda pairs: [*pairs, pairs[2]], "is sent twice"),
    (killed, r"failed after 6 of 50 tensors: RuntimeError: Connection closed by peer"),
]


def names(model):
    return {name: tuple(p.shape) for name, p in model[1].items()}


def test_received_weights_are_identical(model):
    for dtype in (torch.float32, torch.bfloat16):
        got = receive(with_checksums(model[1].items()), names(model), CPU, dtype)
        assert got.keys() == model[1].keys()
        for name, tensor in got.items():
            assert torch.equal(tensor, model[1][name].detach().to(dtype))
            assert tensor.data_ptr() != model[1][name].data_ptr()


@pytest.mark.parametrize(("fault", "message"), FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_are_reported(model, fault, message, dtype):
    with pytest.raises(UpdateRefused, match=message):
        receive(fault(list(with_checksums(model[1].items()))), names(model), CPU, dtype)


@pytest.mark.parametrize("fault", [flipped, killed])
def test_refused_update_keeps_the_old_weights_and_the_next_one_works(model, fault):
    shape = read_shape(model[0])
    engine = TorchEngine(shape, hf_shapes(shape), CPU, torch.float32, 64, sample_tokens)
    request = [Request(Prompt("p", "", (5, 6, 7), None, "exact"), 1, 8)]
    sampling = Sampling(1.0, 1, 0, 12, ())

    def sampled():
        (group,) = engine.generate(request, sampling)
        return engine.version, [(r.token_ids.tolist(), r.log_probs.tolist(), r.spans) for r in group]

    engine.update_weights(with_checksums(model[1].items()), 3)
    before = sampled()
    doubled = [(name, 2 * p.detach()) for name, p in model[1].items()]
    with pytest.raises(UpdateRefused):
        engine.update_weights(fault(list(with_checksums(doubled))), 4)
    assert sampled() == before
    engine.update_weights(with_checksums(doubled), 4)
    version, rollouts = sampled()
    assert version == 4
    assert rollouts != before[1]


def test_refused_stream_is_read_to_its_end(model):
    """The stream is a collective, so other ranks would hang otherwise."""
    pairs = list(with_checksums(model[1].items()))
    stream = iter([ChecksummedTensor("model.other", pairs[0][1], pairs[0].checksum), *pairs])
    with pytest.raises(UpdateRefused, match=r"model\.other is unknown"):
        receive(stream, names(model), CPU, torch.float32)
    assert list(itertools.islice(stream, 1)) == []
