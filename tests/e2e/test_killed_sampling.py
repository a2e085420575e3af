"""A run that is killed while it samples: what had ended is not sampled again, and the bits are those of a whole run."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import forks
import pytest
from e2e.runs import ENVIRONMENT, rows

from megatron_brorl.cli.main import main
from megatron_brorl.rollout.native.engine import TorchEngine

SIZES = ("train.steps=2", "evaluate.every=0", "train.checkpoint_every=0")
SECOND_STEP = 2  # version of the weights that sample it: a step has two updates


def test_killed_while_sampling_and_resumed(config, warm, tmp_path):
    """Without a checkpoint: the first step is done again, to the same weights; 80 rollouts of the second are there."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = watched(whole, config, warm, tmp_path / "1")
    assert done.returncode == 0, done.stderr
    done = watched(parts, config, warm, tmp_path / "2", kill_after=40)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(rows(parts)) == 1
    done = watched(parts, config, warm, tmp_path / "3")
    assert done.returncode == 0, done.stderr

    # Each rollout of the second step once, by one process or the other.
    everything, finished, rest = seen(tmp_path / "1"), seen(tmp_path / "2"), seen(tmp_path / "3")
    assert len(everything) == 6 * 32
    assert len(finished) == 2 * 40
    assert sorted(finished + rest) == sorted(everything)
    times = [json.loads(line)["time"] for line in (parts / "metrics.jsonl").open()]
    assert [t["recovered_rollouts"] for t in times] == [0, 80]
    # Of what was recovered nobody was slow or fast: two devices have sampled the rest alone.
    sampled = 2 * times[1]["throughput/generate_tokens_per_s"] * times[1]["ranks/generate_slowest"]
    assert sampled == pytest.approx(sum(tokens for *_, tokens in rest))
    assert "step 1: 80 rollouts had been sampled before a restart" in done.stderr
    assert not (parts / "unfinished_step").exists()

    assert rows(parts) == rows(whole)
    assert (parts / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


def watched(run: Path, config: Path, model: Path, log: Path, kill_after: int = 0):
    """A run on two ranks, each of which writes down what it samples in the second step, and may be killed then."""
    told = {**ENVIRONMENT, "WATCHED_LOG": str(log), "WATCHED_KILL_AFTER": str(kill_after)}
    arguments = ["train", "--processes", "2", str(config), f"model.path={model}", f"run.dir={run}", *SIZES]
    return forks.command_line(arguments, told, main=watched_main)


def seen(log: Path) -> list[tuple[int, int, int]]:
    """(stream key, sibling, tokens) of what the engines of all ranks finished."""
    return [tuple(json.loads(line)) for path in log.parent.glob(f"{log.name}.*") for line in path.open()]


def watched_main(arguments: list[str]) -> None:
    """In a rank: the command line with an engine that is looked at."""
    generate = TorchEngine.generate

    def looked_at(self, requests, sampling, watch=None, supply=None):
        if watch and self.version == SECOND_STEP and sampling.log_probs:  # not an evaluation
            path = f"{os.environ['WATCHED_LOG']}.{os.environ['RANK']}"
            with open(path, "a", buffering=1) as file:
                return generate(self, requests, sampling, _Looking(watch, requests, file), supply)
        return generate(self, requests, sampling, watch, supply)

    TorchEngine.generate = looked_at
    main(arguments)


@dataclass
class _Looking:
    """A Watch that writes down what ends, and ends the process after so many rollouts."""

    watch: object
    requests: object
    file: object
    count: int = 0

    def finished(self, request, rollout):
        self.watch.finished(request, rollout)
        print(json.dumps([self.requests[request].key, rollout.index, len(rollout.token_ids)]), file=self.file)
        self.count += 1
        if self.count == int(os.environ["WATCHED_KILL_AFTER"]):
            os.kill(os.getpid(), signal.SIGKILL)

    def cancelled(self):
        return self.watch.cancelled()
