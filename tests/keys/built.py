"""Looks at what cli/build.py makes of a configuration, and at what libraries are told."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from keys.case import Place, configured

from megatron_brorl.checkpoints.model_card import model_card
from megatron_brorl.cli import preflight
from megatron_brorl.cli.build import Session
from megatron_brorl.cli.card import of_warm_start
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.model_shape import read_shape
from megatron_brorl.models import fp8, memory
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.parallel.device import bridge
from megatron_brorl.rewards.pool import ScoreRequest
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.train import worker as workers
from megatron_brorl.train.rounds import Taken, prompts_to_ask
from megatron_brorl.train.setup import training_sampling
from megatron_brorl.train.sft import sft, sft_optim
from megatron_brorl.types import Prompt


def _files() -> list[str]:
    """Of run.dir."""
    return sorted(str(path) for path in Path("run").rglob("*") if not path.name.startswith("events."))


@contextlib.contextmanager
def _session(config: Config, **options: Any) -> Any:
    """What it opens is closed, but for the grid, which other looks use too."""
    shutil.rmtree("run", ignore_errors=True)
    session = Session(config, **options)
    try:
        yield session
    finally:
        for close in reversed(session._closing[1:]):
            close()


def folders(config: Config, place: Place) -> Any:
    """The folder that a run takes for itself."""
    for name in ("run", "elsewhere"):
        shutil.rmtree(name, ignore_errors=True)
    with _session(config) as session:
        session._lock()
    return sorted(path.name for path in Path().iterdir() if path.name in ("run", "elsewhere"))


def card(config: Config, place: Place) -> Any:
    """The card of the model that it writes."""
    with _session(config) as session:
        return model_card(of_warm_start(session))


def stops(config: Config, place: Place) -> Any:
    """Whether the job is over before the first step."""
    with _session(config) as session:
        return session.stop_requested()


def writers(config: Config, place: Place) -> Any:
    """Folders and files of figures and rollouts."""
    with _session(config) as session:
        session.dir.mkdir()
        session.writer(None)
        if log := session.rollout_log(None):
            log.append([{"row": 1}])
        return _files()


def shape(config: Config, place: Place) -> Any:
    """The model that is trained."""
    with _session(config) as session:
        return session.shape


def dtypes(config: Config, place: Place) -> Any:
    """Of the trained weights."""
    with _session(config) as session:
        return {tensor.dtype for _, tensor in session.worker(None).hf_tensors()}


def waits(config: Config, place: Place) -> Any:
    """Seconds that ranks wait for one another."""
    with _session(config) as session:
        return session.grid.patience


def operations(config: Config, place: Place) -> Any:
    """The implementation that draws tokens."""
    with _session(config) as session:
        return session.ops.sample_tokens.__module__


def checkpoints(config: Config, place: Place) -> Any:
    """What becomes of the folder of an earlier run."""
    with _session(config) as session:
        (session.dir / "checkpoints").mkdir(parents=True)
        session.newest_checkpoint()
        return _files()


def megatron(config: Config, place: Place) -> Any:
    """What Megatron's DDP and optimizer are told."""
    told: list[Any] = []
    for name in ("DistributedDataParallelConfig", "OptimizerConfig"):
        kind = getattr(workers, name)
        place.monkeypatch.setattr(workers, name, lambda kind=kind, **given: told.append(given) or kind(**given))
    # A session refuses on a CPU what its checkpoints cannot hold there.
    with _session(configured({})) as session:
        session.config = replace(session.config, parallel=config.parallel)
        workers.Worker(session.shape, session.grid, session._stage_options(config.optim), config.optim)
    place.monkeypatch.undo()
    place.monkeypatch.chdir(place.folder)
    return told


def layers(config: Config, place: Place) -> Any:
    """Fields of Megatron's model about memory."""
    with _session(config) as session:
        found = session.worker(None).actor.config
        return found.recompute_granularity, found.recompute_method, found.recompute_modules


def fp8_fields(config: Config, place: Place) -> Any:
    """Fields of Megatron's model about FP8."""
    return fp8.settings(config.fp8)


def logits(config: Config, place: Place) -> Any:
    """What the LM head makes of hidden states."""
    hidden, weight = torch.arange(20.0).view(2, 10), torch.arange(30.0).view(3, 10).cos()
    with _session(config) as session:
        return session.ops.linear_logits(hidden, weight).tolist()


def packed(config: Config, place: Place) -> Any:
    """Tokens of each micro-batch of eight siblings."""
    prompt = torch.arange(3, 43)
    with _session(config) as session:
        batches = session.worker(None).micro_batches([prompt] * 8, [torch.arange(5, 25)] * 8)
    return [len(batch.input_ids) for batch in batches]


def plan(config: Config, place: Place) -> Any:
    """What is planned of memory, on eight GPUs of 80 GiB."""
    found = preflight.plan(config, read_shape("model"), preflight.Machines(8, 8, 80 << 30, here=False))
    return memory.lines(found, 80 << 30, 8)


def prompts(config: Config, place: Place) -> Any:
    """What the model is trained on and asked, and what is said of it."""
    found = load_sources(config.data, load_tokenizer(Path("model")), 200, config.run.seed, config.reward)
    return found.train.take(0, 8), found.held_out, found.verifiers, found.report


def long_prompts(config: Config, place: Place) -> Any:
    """Whether prompts leave room for a response."""
    with _session(config) as session:
        return session.report


def benchmarks(config: Config, place: Place) -> Any:
    """What `brorl evaluate` asks."""
    with _session(config, benchmarks=True) as session:
        return {name: [p.id for p in asked] for name, asked in session.benchmarks.items()}


def asks(config: Config, place: Place) -> Any:
    """Prompts of a round after one that kept one in ten."""
    return prompts_to_ask(4, Taken(1, 10, 10.0, 1.0), config.rollout)


def sampled(config: Config, place: Place, n: int = 8) -> Any:
    """What the built-in engine draws with the weights of the model, and how full its cache was."""
    with _session(config) as session:
        engine = session._torch_engine()
        assert set(engine.names) == set(hf_shapes(session.shape))
        engine.update_weights(session.worker(None).hf_tensors(), 0)
        asked = [Request(Prompt("a", "", (5, 6, 7), None, "exact"), 11, n)]
        rows = Watchdog(engine, 60.0).generate(asked, training_sampling(session.config, session.stop_ids)).rollouts[0]
        drawn = [(r.token_ids.tolist(), r.log_probs.tolist(), r.finish) for r in sorted(rows, key=lambda r: r.index)]
        return drawn, engine.kv_usage()


def crowded(config: Config, place: Place) -> Any:
    """The same of as many siblings as take more than a MiB."""
    return sampled(config, place, 256)


def serving(config: Config, place: Place) -> Any:
    """Whether rollouts are handed on, the scoring processes, and the verdict on a slow answer."""
    before = set(psutil.Process().children(recursive=True))
    with _session(config) as session:
        rollouts = session.rollouts()
        prompt = Prompt("a", "", (5,), "1", "slow.py:score")
        verdicts = [rollouts.pool.submit(ScoreRequest(prompt, str(i), "")) for i in range(4)]
        told = [verdict.result().status for verdict in verdicts]
        started = {p for p in psutil.Process().children(recursive=True) if p not in before}
        return rollouts.pulling is None, len(started), told


def warm(config: Config, place: Place) -> Any:
    """Supervised training: its figures and the weights after it."""
    rows: list[Any] = []

    class Writer:
        def write(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
            rows.append(metrics)

    class Progress:
        def update(self, *_: Any) -> None:
            pass

    with _session(config) as session:
        optim = sft_optim(config.sft, config.optim)
        worker, source = session.worker(optim), session.sources.train
        sft(worker, source, session.tokenizer, config.sft, optim, Writer(), Progress())  # type: ignore[arg-type]
        with bridge():
            return rows, [float(tensor.double().sum()) for _, tensor in worker.hf_tensors()]
