"""What `brorl advise` says of a warm start's prompts, from a pilot of a few steps that the map's runs do not see."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron_brorl.cli import main, train
from megatron_brorl.cli.program import NOTHING
from study import results
from study.design import Design
from study.order import Run
from study.places import place_of, work
from study.trial import common, overrides

_ADVICE = "advice"  # a folder in the pilot's own


def sample(design: Design, directory: Path, run: Run) -> None:
    """The pilot: it logs its rollouts and measures the gradient's noise in every step."""
    own = {
        "train.steps": design.maps[0].steps,
        "theory.every": 1,
        "theory.noise_every": 1,
        "theory.log_rollouts": "true",
        "data.held_out": "[]",
    }
    place = place_of(directory, run.warm_start)
    config = design.run_config([*overrides(design, run, place, directory), *(f"{k}={v}" for k, v in own.items())])
    train.execute(config, lambda ranks: "", NOTHING)


def advise(directory: Path, run: Run) -> None:
    """The command that a user gives; prices are those of the pilot's own seconds."""
    folder = work(directory, run.name)
    main.main(["advise", str(folder / "rollouts.jsonl"), "--run", str(folder), "--out", str(folder / _ADVICE)])


def note(design: Design, directory: Path, run: Run, commit: str) -> None:
    """A row with the answer: N and prompts per step, null where the advisor knows none."""
    found = json.loads((work(directory, run.name) / _ADVICE / "advice.json").read_text(encoding="utf-8"))
    both: dict[str, Any] | None = found["together"]
    row = common(design, run, design.run_config([]), commit) | {
        "error": "",
        "point": 0,
        "prompt_set": "advice",
        "load_average": os.getloadavg()[0],
        "began": time.time(),
        "advised_n": both and both["n"],
        "advised_low": both and both["n_low"],
        "advised_high": both and both["n_high"],
        "advised_prompts": both and both["prompts"],
    }
    results.write_run(directory, run.name, [row])
