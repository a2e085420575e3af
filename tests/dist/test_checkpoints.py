"""Checkpoints of training: bit-exact resume, other layouts, refused layouts, and writing in the background."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from dist.steps import VARIANTS, assert_same, restore, take_steps, trainer_of
from dist.world import EP, PP, SEQUENCE, TP
from safetensors.torch import load_file

from megatron_brorl.checkpoints.training import Save
from megatron_brorl.errors import UserError
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import to_local
from megatron_brorl.train.worker import Worker

pytestmark = pytest.mark.slow
TP_EP, EP4 = SEQUENCE | EP, {"expert": 4}
DISTRIBUTED_OPTIMIZER = {"parallel": {"distributed_optimizer": True}}
OVERLAP = {"parallel": {"distributed_optimizer": True, "overlap": True}}
BF16 = {"model": {"dtype": "bf16"}}
# The fake engine records no experts.
FEW_ROLLOUTS = {"rollout": {"prompts": 3, "n": 8, "replay_routes": "never"}, "theory": {"every": 0}}
CRITIC, KL = (VARIANTS[name] | FEW_ROLLOUTS for name in ("critic", "reward_kl"))
PARTIAL = VARIANTS["partial"] | FEW_ROLLOUTS | {"rollout": FEW_ROLLOUTS["rollout"] | {"partial_tokens": 4}}
# The checkpoint also has the adapters of a reference policy.
LORA = FEW_ROLLOUTS | {"lora": {"rank": 3, "alpha": 12.0}, "algo": {"kl_coef": 0.05}, "reference": {"reset_every": 1}}
LORA_CRITIC = LORA | DISTRIBUTED_OPTIMIZER | {"algo": {"kl_coef": 0.05, "advantage": "gae"}}
# Family, ranks, layout, settings, and ranks and layouts of runs that continue from the checkpoint.
RESUMED = [
    ("qwen2", 1, {}, PARTIAL, [(2, {})]),
    ("qwen2", 4, PP, PARTIAL, [(2, {})]),
    ("qwen2", 2, TP, CRITIC, [(1, {})]),
    ("qwen2", 4, TP | PP, CRITIC, [(2, {})]),
    ("qwen2", 2, {}, CRITIC | DISTRIBUTED_OPTIMIZER, [(1, {}), (4, {})]),
    ("qwen2", 4, PP, CRITIC | DISTRIBUTED_OPTIMIZER, []),
    ("qwen2", 2, TP, FEW_ROLLOUTS | DISTRIBUTED_OPTIMIZER, []),
    ("qwen2", 2, {}, FEW_ROLLOUTS | OVERLAP | BF16, []),
    ("qwen2", 1, {}, LORA, [(2, SEQUENCE), (2, PP)]),
    ("qwen2", 2, SEQUENCE, LORA, [(1, {})]),
    ("qwen2", 2, PP, LORA, [(1, {})]),
    ("qwen2", 2, {}, LORA_CRITIC, [(1, {})]),
    ("qwen2", 2, {}, LORA_CRITIC | BF16, []),
    ("qwen3_moe", 2, EP, CRITIC, [(4, TP_EP | PP)]),
    ("qwen3_moe", 2, TP_EP, KL, [(1, {})]),
    ("qwen3_moe", 4, EP4, FEW_ROLLOUTS, [(2, TP_EP)]),
    ("qwen3_moe", 2, EP, FEW_ROLLOUTS | DISTRIBUTED_OPTIMIZER, [(4, EP)]),
    ("qwen3_moe", 2, TP_EP, FEW_ROLLOUTS | DISTRIBUTED_OPTIMIZER | BF16, []),
    ("qwen3_moe", 4, EP, CRITIC | OVERLAP, []),
    ("qwen3_moe", 4, PP | EP, FEW_ROLLOUTS | BF16, []),
]


def both_ways(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> tuple[list[dict[str, float]], list[str], bool]:
    """Take two steps, save a checkpoint at once and one in the background, and take two more steps.

    Return metrics, the files of the second checkpoint during the third step, and whether it was unfinished then."""
    trainer = trainer_of(directory, parallel, changes)
    trainer.run_seconds = lambda: 7.5  # type: ignore[method-assign]  # wall-clock time, which run.json holds
    metrics = take_steps(trainer, 2)

    def save_under(name: str) -> None:
        run = replace(trainer.config.run, dir=f"{root}/{name}")
        trainer.config = replace(trainer.config, run=run)

    save_under("at_once")
    trainer.save()

    # No file is written before all ranks have finished the third step.
    third_step_done = threading.Event()
    write = Save.write

    def write_late(*arguments: Any) -> None:
        assert third_step_done.wait(timeout=60)
        write(*arguments)

    save_under("meanwhile")
    Save.write = write_late  # type: ignore[method-assign]
    try:
        trainer.save(in_background=True)
        metrics.append(trainer.train_step()[0])
        unfinished = sorted(p.name for p in Path(f"{root}/meanwhile/checkpoints").iterdir())
        busy = trainer.background_saver.busy()
        third_step_done.set()
        # The messages of the saver and of a step overlap.
        metrics.append(trainer.train_step()[0])
        assert trainer.background_saver.wait()
    finally:
        Save.write = write  # type: ignore[method-assign]
    return metrics, unfinished, busy


def saves_over_dirty_memory(_rank: int, directory: str, changes: dict[str, Any], roots: list[str]) -> None:
    """Save one state twice; the second time new tensors of `torch.empty` are full of sevens."""
    trainer = trainer_of(directory, {}, changes)
    trainer.run_seconds = lambda: 7.5  # type: ignore[method-assign]
    take_steps(trainer, 1)
    empty = torch.empty
    for root, dirty in zip(roots, (False, True), strict=True):
        trainer.config = replace(trainer.config, run=replace(trainer.config.run, dir=root))
        try:
            if dirty:
                torch.empty = lambda *a, **k: empty(*a, **k).fill_(7)  # type: ignore[assignment]
            trainer.save()
        finally:
            torch.empty = empty  # type: ignore[assignment]


def refused(_rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str) -> str:
    """Return the error with which a trainer of another layout answers the checkpoint under `root`."""
    try:
        restore(trainer_of(directory, parallel, changes | {"run": {"seed": 3, "dir": root}}))
    except UserError as e:
        return str(e)
    return ""


def masters(
    _rank: int, directory: str, parallel: dict[str, Any], root: str
) -> tuple[tuple[set[str], set[str]], tuple[set[str], set[str]]]:
    """Compare float32 masters of a bfloat16 model with its file: after loading, and after a checkpoint before any step.

    Return, for both moments, the names of the tensors that differ, and of all tensors of which this rank has a part.
    """
    changes = DISTRIBUTED_OPTIMIZER | {"model": {"dtype": "bf16"}, "run": {"seed": 3, "dir": root}}
    stored = load_file(f"{directory}/model.safetensors")

    def compare(worker: Worker) -> tuple[set[str], set[str]]:
        parameters = names.global_parameters(worker.actor)
        entries = {id(parameters[e.megatron]): e for e in names.entries(worker.shape, 1) if e.megatron in parameters}
        wrong: set[str] = set()
        compared: set[str] = set()
        for optimizer, parameter, master in _masters(worker):
            entry = entries[id(parameter)]
            flat = to_local(entry, [stored[name] for name in entry.hf], worker.shape.kv_heads, rank=0, size=1).flatten()
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            compared.update(entry.hf)
            if not torch.equal(master, flat[start : start + len(master)]):
                wrong.update(entry.hf)
        return wrong, compared

    first = trainer_of(directory, parallel, changes)
    first.save()
    second = trainer_of(directory, parallel, changes)
    for _, _, master in _masters(second.models.actor):
        master.detach().zero_()
    restore(second)
    return compare(first.models.actor), compare(second.models.actor)


def _masters(worker: Worker) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Yield each optimizer, parameter, and this rank's part of the float32 master."""
    for optimizer in worker.optimizer.chained_optimizers:
        for groups in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
            for parameter, master in zip(*groups, strict=True):
                yield optimizer, parameter, master


@pytest.fixture(scope="module")
def directories(directory, experts):
    return {"qwen2": directory, "qwen3_moe": experts}


@pytest.mark.parametrize(("family", "size", "parallel", "changes", "continuations"), RESUMED)
def test_resume_is_bit_exact_and_other_layouts_continue(
    worlds, directories, tmp_path, family, size, parallel, changes, continuations
):
    """Metrics and weights after the checkpoint depend on all of its state, also on carried rollouts and step counts."""
    steps = 4 if changes is PARTIAL else 3
    results = worlds(size).run(
        "steps:resumed", directories[family], parallel, changes, steps=steps, stop_at=2, root=str(tmp_path)
    )
    for metrics, weights, metrics_after, weights_after in results:
        assert metrics[-1]["updates"] > 0
        assert [repr(m) for m in metrics_after] == [repr(m) for m in metrics[2:]]  # some are NaN
        assert all(torch.equal(weights_after[name], value) for name, value in weights.items())
    carried = list((tmp_path / "checkpoints" / "step_00000002").glob("carried_*"))
    assert len(carried) == (size if changes is PARTIAL else 0)
    metrics, weights, *_ = results[0]
    for ranks, other_layout in continuations:
        continued = worlds(ranks).run(
            "steps:go_on", directories[family], other_layout, changes, steps=steps - 2, root=str(tmp_path)
        )
        assert_same(continued, (metrics[2:], weights))


@pytest.mark.parametrize(
    ("family", "saved", "refusals"),
    [
        (
            "qwen2",
            {},
            [
                (
                    TP,
                    DISTRIBUTED_OPTIMIZER,
                    "parallel.tensor = 1, parallel.pipeline = 1, .* this run has .*parallel.tensor = 2",
                ),
                (PP, DISTRIBUTED_OPTIMIZER, "parallel.pipeline = 1, .* and this run has .*parallel.pipeline = 2"),
                ({}, {}, "and this run has parallel.distributed_optimizer = false"),
            ],
        ),
        ("qwen3_moe", EP, [({}, DISTRIBUTED_OPTIMIZER, "parallel.expert = 2 and this run has .*parallel.expert = 1;")]),
    ],
)
def test_the_distributed_optimizer_needs_the_saved_layout(worlds, directories, tmp_path, family, saved, refusals):
    """Only the number of replicas may differ."""
    first_run = FEW_ROLLOUTS | DISTRIBUTED_OPTIMIZER
    worlds(2).run("steps:resumed", directories[family], saved, first_run, steps=1, stop_at=1, root=str(tmp_path))
    for parallel, changes, pattern in refusals:
        for refusal in worlds(2).run(
            "test_checkpoints:refused", directories[family], parallel, FEW_ROLLOUTS | changes, str(tmp_path)
        ):
            assert "step_00000001" in refusal
            assert re.search(pattern, refusal)


def test_equal_states_are_equal_files(worlds, directory, tmp_path):
    """The memory that Megatron allocates as padding between parameters makes no difference."""
    roots = [str(tmp_path / name) for name in ("clean", "dirty")]
    worlds(2).run("test_checkpoints:saves_over_dirty_memory", directory, FEW_ROLLOUTS | OVERLAP, roots)
    clean, dirty = ({p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.distcp")} for n in ("clean", "dirty"))
    assert clean
    assert clean == dirty


@pytest.mark.parametrize(("size", "parallel", "family"), [(2, {}, "qwen2"), (4, EP, "qwen3_moe")])
def test_masters_are_the_values_of_the_file(worlds, tmp_path, size, parallel, family):
    """Masters are not rounded to bfloat16, also after a checkpoint before the first step."""
    tiny.make_model(tmp_path, family, tied=False)
    all_names = tiny.weights(tmp_path).keys()
    results = worlds(size).run("test_checkpoints:masters", str(tmp_path), parallel, str(tmp_path / "run"))
    for names_by_rank in zip(*results, strict=True):
        assert [wrong for wrong, _ in names_by_rank] == [set()] * size
        assert set().union(*(compared for _, compared in names_by_rank)) == all_names


@pytest.mark.parametrize(("size", "parallel", "variant"), [(2, {}, "partial"), (2, TP, "reward_kl"), (4, PP, "critic")])
def test_background_checkpoints_have_the_state_at_their_start(worlds, directory, tmp_path, size, parallel, variant):
    """The bytes are equal, although all weights and moments change before the first file is written.

    Neither way changes a metric of the run."""
    changes = VARIANTS[variant]
    results = worlds(size).run("test_checkpoints:both_ways", directory, parallel, changes, str(tmp_path))
    without_saves = worlds(size).run("steps:run_steps", directory, parallel, changes, steps=4, faults={})
    for (metrics, unfinished, busy), (expected, _, _) in zip(results, without_saves, strict=True):
        assert [repr(row) for row in metrics] == [repr(row) for row in expected]
        assert unfinished == [".step_00000002.writing"]
        assert busy

    at_once, meanwhile = (files(tmp_path / name / "checkpoints") for name in ("at_once", "meanwhile"))
    assert list(at_once) == list(meanwhile)
    assert [name for name in at_once if at_once[name] != meanwhile[name]] == []
    metadata = next(data for name, data in at_once.items() if name.endswith(".metadata"))
    assert (b"exp_avg_sq" in metadata) == (variant != "partial")  # "partial" closes no group in two steps
    assert any("carried_" in name for name in at_once) == (variant == "partial")


def files(root):
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
