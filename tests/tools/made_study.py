"""A small design, and a table of results that is written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from study import design as designs

DESIGNS = Path(__file__).parents[2] / "tools" / "study" / "designs"

TOML = """
name = "made"
question = "which?"
mixed_model = false
[[claims]]
claim = "n64 is ahead"
refuted_by = "an interval below 0"
[warm_starts]
tune = [9]
test = [1, 2, 3]
[prompts]
pool = 50
samples = 64
trained = 2
unseen = 2
bins = [{ name = "hard", least = 1, most = 8 }, { name = "easy", least = 9, most = 60 }]
[budget]
seconds = 10.0
[evaluation]
points = 2
trained = 8
unseen = 4
final_unseen = 8
k = 8
support = 16
[[arms]]
name = "n8"
n = 8
prompts = 2
lr = 1e-3
[[arms]]
name = "n64"
n = 64
prompts = 2
lr = 2e-3
[[arms]]
name = "n8wide"
n = 8
prompts = 16
rate_of = "n64"
bins = ["hard"]
[tuning]
factors = [0.5, 1.0]
bins = ["easy"]
[[comparisons]]
before = "n8"
after = "n64"
end_point = "final"
over = "seconds"
prompt_set = "trained"
bins = ["hard", "easy"]
[[comparisons]]
before = "n8wide"
after = "n64"
end_point = "area"
over = "rollouts"
prompt_set = "trained"
bins = ["hard"]
[[plateau]]
arm = "n8"
bins = ["easy"]
arms = ["n8", "n64"]
warm_starts = [1]
gain = 0.1
most = 4
[config.data]
tasks = [{ name = "gcd" }]
"""


def write(folder: Path, text: str = TOML) -> Path:
    """The design's file."""
    path = folder / "made.toml"
    path.write_text(text)
    return path


def made(folder: Path, text: str = TOML) -> designs.Design:
    """The design."""
    return designs.read(write(folder, text))


def run_rows(
    design: designs.Design,
    phase: str,
    arm: str,
    of: str,
    seed: int,
    points: list[tuple[float, float, list[int]]],
    **more: Any,
) -> list[dict[str, Any]]:
    """Rows of the trained prompts, at (seconds, rollouts, right of 8 samples of each prompt)."""
    lr = more.pop("lr", 1e-3)
    part = more.get("part", 0)
    found = []
    for number, (seconds, rollouts, right) in enumerate(points):
        found.append(
            {
                "design_sha256": designs.sha256(design),
                "config_sha256": "c",
                "run": f"{phase}_w{seed}_{of}_{arm}_{lr:g}_{part}",
                "phase": phase,
                "arm": arm,
                "bin": of,
                "warm_start": seed,
                "part": part,
                "lr": lr,
                "n": design.arm(arm).n,
                "prompts_per_step": design.arm(arm).prompts,
                "error": "",
                "point": number,
                "steps": number,
                "updates": number,
                "seconds": seconds,
                "cpu_seconds": 2 * seconds,
                "rollouts": rollouts,
                "tokens": 5 * rollouts,
                "kept_share": None if not number else 0.5,
                "prompt_set": "trained",
                "pass_at_1": sum(right) / (8 * len(right)),
                "k": 8,
                "pass_at_k": sum(r > 0 for r in right) / len(right),
                "response_tokens": 5.0,
                "prompts": [f"p{seed}.{i}" for i in range(len(right))],
                "right": right,
                "samples": [8] * len(right),
                **dict.fromkeys(("advised_n", "advised_low", "advised_high", "advised_prompts")),
                "load_average": 0.5,
                "began": 0.0,
                "machine": "a machine",
                "versions": '{"torch": "2"}',
                **more,
            }
        )
    return found
