"""Weight sync from any layout to the engines is bit-exact; faults are found, reported and repaired."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from conversions import assert_same_weights, to_hf, to_megatron
from dist.jobs import rows
from dist.world import World, pairs

pytestmark = pytest.mark.slow
BIG = (4, {"tensor": 2, "pipeline": 2})
EP2, EP4, TP = {"expert": 2}, {"expert": 4}, {"tensor": 2, "sequence": True}
EXPERTS = [
    *((1, {}), (2, EP2), (2, {**TP, **EP2}), (2, {"context": 2, **EP2})),
    *((4, EP4), (4, EP2), (4, {"pipeline": 2, **EP2}), (4, {**TP, **EP4}), (4, {**TP, **EP2, "pipeline": 2})),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Twenty sets of weights of one model: vocabulary that tensor=2 does not divide, tied, biases."""
    root = tmp_path_factory.mktemp("weights")
    for i in range(20):
        tiny.make_model(root / str(i), "qwen2", True, seed=i)
    return [str(root / str(i)) for i in range(20)]


def test_twenty_weight_syncs_are_bit_exact(worlds, weights):
    size, parallel = BIG
    assert worlds(size).run("weight_sync_jobs:syncs", weights, parallel) == [[]] * size


@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    [
        *pairs(
            [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2}), (4, {"tensor": 2})],
            [("qwen3", False), ("qwen2", True), ("llama", True)],
        ),
        *pairs(EXPERTS, [("qwen3_moe", True)]),
        *pairs([EXPERTS[i] for i in (0, 2, 6)], [("qwen2_moe", True)]),
    ],
)
def test_every_layout_and_family(worlds, tmp_path, size, parallel, case):
    for seed in range(2):
        tiny.make_model(tmp_path / str(seed), *case, seed=seed)
    directories = [str(tmp_path / str(seed)) for seed in range(2)]
    assert worlds(size).run("weight_sync_jobs:syncs", directories, parallel) == [[]] * size
    if case[0] in tiny.MIXTURES:
        assert max(worlds(size).run("jobs:engine_gap", directories[0], parallel)) <= 5e-5


FAULTS = {
    "drop": "weight update: 7 tensors missing, for example model.layers.0.",
    "swap": "weight update: 2 tensors do not match their checksums, for example model.layers.2.self_attn.k_proj.weight",
    "flip": "weight update: 1 tensors do not match their checksums, for example model.layers.3.mlp.down_proj.weight",
    "stop": "weight update: failed after 8 of 50 tensors: RuntimeError: engine killed",
}


@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_is_repaired_by_sending_again(worlds, weights, fault, where):
    size, parallel = BIG
    for result in worlds(size).run("weight_sync_jobs:faulty", weights[0], parallel, fault, where, 1):
        assert result == {"refused": "", "again": 1, "after": 0, "right": True}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_permanent_fault_is_refused_by_every_rank(worlds, weights, fault):
    """The engine that refused keeps its version; after the next sync all versions are equal."""
    size, parallel = BIG
    results = worlds(size).run("weight_sync_jobs:faulty", weights[0], parallel, fault, 2, 2)
    for rank, result in enumerate(results):
        expected = FAULTS[fault] if rank == 2 else "version 1: refused by the engine of another rank"
        assert expected in result["refused"]
        assert result["after"] == 0
        assert result["right"]
    assert results[2]["kept"]


def test_a_rank_that_dies_in_an_update_leaves_the_other_engines_unchanged(weights):
    """After a SIGKILL the other ranks' collective fails, no engine has mixed weights, and a new world works."""
    world = World(4)
    answers = []
    try:
        with pytest.raises((EOFError, ConnectionError)):
            world.run("weight_sync_jobs:killed", weights[0], BIG[1], 0)
        for pipe, process in list(zip(world.pipes, world.processes, strict=True))[1:]:
            assert pipe.poll(120)
            answers.append(pipe.recv())
            process.kill()  # as a rank with an error ends, so that its peers notice
    finally:
        world.close()
    assert len(answers) == 3
    for ok, (message, untouched) in answers:
        assert ok
        assert "weight update: failed after" in message
        assert untouched


def test_different_copies_of_the_weights_are_refused(worlds, weights):
    for message in worlds(2).run("weight_sync_jobs:drifted", weights[0], {}):
        assert "the ranks were sent different bytes" in message


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (2, {}), (2, {"tensor": 2}), BIG])
def test_verify_weights(worlds, weights, size, parallel):
    gaps = worlds(size).run("weight_sync_jobs:verified", weights[0], parallel, False)
    assert len(set(gaps)) == 1
    assert 0 < gaps[0] < 1e-4
    for message in worlds(size).run("weight_sync_jobs:verified", weights[0], parallel, True):
        assert "an engine's log-probs differ from the actor's by" in message


@pytest.mark.parametrize(
    ("size", "source", "target"),
    [
        (2, {"tensor": 2}, {"pipeline": 2}),
        (2, {"pipeline": 2}, {"tensor": 2}),
        (4, {"tensor": 2, "pipeline": 2}, {"tensor": 4}),
    ],
)
def test_megatron_s_own_resharding_agrees(worlds, tmp_path, size, source, target):
    """megatron.core.resharding moves the weights to another layout; our stream of them equals the directory."""
    tiny.make_model(tmp_path, "llama", False, num_key_value_heads=4, vocab_size=104)
    assert worlds(size).run("weight_sync_jobs:between_layouts", str(tmp_path), source, target) == [[]] * size


@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    pairs([(1, {}), (2, {"pipeline": 2}), BIG, (4, {"tensor": 2})], [("qwen2", True), ("qwen3", False)]),
)
def test_megatron_loads_converted_checkpoints(worlds, tmp_path, size, parallel, case):
    """Convert for two tensor ranks and two stages, load by Megatron in every layout, compare with transformers."""
    model = tiny.make_model(tmp_path / "hf", *case)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", 2, 2)
    prompts, responses = rows(1)
    results = worlds(size).run(
        "weight_sync_jobs:load_converted", str(tmp_path / "hf"), str(tmp_path / "megatron"), parallel
    )
    for wrong, log_probs in results:
        assert wrong == []
        for found, prompt, response in zip(log_probs, prompts, responses, strict=True):
            torch.testing.assert_close(found, tiny.log_probs(model, prompt, response), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [("qwen2", True), ("qwen3", False)])
def test_checkpoints_are_divided_as_megatron_divides_them(worlds, tmp_path, case):
    """Keys, types, global shapes and chunks equal those of Megatron's saver on four ranks, and the way back works."""
    from torch.distributed.checkpoint import FileSystemReader

    tiny.make_model(tmp_path / "hf", *case)
    to_megatron(tmp_path / "hf", tmp_path / "ours", 2, 2)
    worlds(4).run("weight_sync_jobs:save_by_megatron", str(tmp_path / "hf"), str(tmp_path / "theirs"), BIG[1])

    def described(name):
        found = {}
        for key, meta in FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata.items():
            if key.startswith("common_state/"):
                continue  # Megatron-Core 0.19 writes a copy of common.pt here, and reads either.
            found[key] = None
            if hasattr(meta, "chunks"):
                chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in meta.chunks)
                found[key] = (tuple(meta.size), meta.properties.dtype, chunks)
        return found

    assert described("ours") == described("theirs")
    ours, theirs = (json.loads((tmp_path / name / "metadata.json").read_text()) for name in ("ours", "theirs"))
    assert theirs.items() <= ours.items()  # Megatron-Core 0.19 names no backend of common.pt any more.
    to_hf(tmp_path / "theirs", tmp_path / "back", config=tmp_path / "hf")
    assert_same_weights(tmp_path / "hf", tmp_path / "back")
