"""Tests that faults in a weight update are detected."""

from __future__ import annotations

import pytest
import torch
from checksums import with_checksums

from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.rollout.weight_stream import UpdateRefused, receive

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(model):
    return dict(model[1].named_parameters())


def swapped(pairs):
    """Swap k and v of one layer, which have the same shape, with their checksums."""
    by_name = {pair[0]: pair for pair in pairs}
    k, v = (f"model.layers.1.self_attn.{x}.weight" for x in ("k_proj", "v_proj"))
    by_name[k], by_name[v] = by_name[v], by_name[k]
    return [ChecksummedTensor(name, pair[1], pair.checksum) for name, pair in by_name.items()]


def renamed(pairs):
    return [ChecksummedTensor("model.other", pairs[0][1], pairs[0].checksum), *pairs[1:]]


def cut(pairs):
    return [ChecksummedTensor(pairs[0][0], pairs[0][1][:-1], pairs[0].checksum), *pairs[1:]]


# Faults of the transport are in test_weight_sync_of_layouts.py.
FAULTS = [
    (swapped, "2 tensors do not match their checksums, for example model.layers.1.self_attn.k_proj.weight"),
    (renamed, "model.other is unknown"),
    (cut, r"model.embed_tokens.weight has shape \[102, 48\]"),
    (lambda pairs: [*pairs, pairs[2]], "is sent twice"),
    (lambda pairs: [*pairs[:5], *pairs[12:]], "7 tensors missing, for example model.layers.0."),
]


def shapes(weights):
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def test_received_weights_are_identical(weights):
    for dtype in (torch.float32, torch.bfloat16):
        received = receive(with_checksums(weights.items()), shapes(weights), CPU, dtype)
        assert received.keys() == weights.keys()
        for name, tensor in received.items():
            assert torch.equal(tensor, weights[name].detach().to(dtype))
            assert tensor.data_ptr() != weights[name].data_ptr()


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_faults_are_reported(weights, fault, message):
    """The stream is read to its end. It is a collective, so other ranks would hang otherwise."""
    stream = iter(fault(list(with_checksums(weights.items()))))
    with pytest.raises(UpdateRefused, match=message):
        receive(stream, shapes(weights), CPU, torch.float32)
    assert list(stream) == []
