"""What a study declares before its first run, read from TOML, checked, and hashed."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_brorl.config.load import load_table
from megatron_brorl.config.schema import Config
from megatron_brorl.config.toml import build
from megatron_brorl.errors import UserError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Axis = Literal["seconds", "rollouts", "tokens"]
PromptSet = Literal["trained", "unseen"]


@dataclass(frozen=True)
class Claim:
    """A statement, and what would refute it, both written before the runs."""

    claim: str
    refuted_by: str


@dataclass(frozen=True)
class WarmStarts:
    """Where runs begin: models of the project's own, each from its own seed. They are the unit of the statistics."""

    tune: tuple[int, ...]  # seeds of those that learning rates are chosen on
    test: tuple[int, ...]  # seeds of those that are compared on, none of which is in `tune`
    model: dict[str, Any] = field(default_factory=dict)  # options of tools/make_tiny_model.py: {hidden = 64}
    stages: tuple[tuple[str, ...], ...] = ((),)  # overrides of each supervised training, one after another


@dataclass(frozen=True)
class Bin:
    """Prompts of one difficulty: right `least` to `most` times out of prompts.samples under the warm start."""

    name: str
    least: int
    most: int


@dataclass(frozen=True)
class Prompts:
    """Of each warm start its own: generated, none of them in its supervised training."""

    pool: int  # how many are sampled from, to be put into bins
    samples: int  # of each of them
    trained: int  # prompts of a bin that a run trains on
    unseen: int  # that no run trains on, whatever their difficulty
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Budget:
    """A run ends after the first step that reaches one of these; 0 = no such limit."""

    seconds: float = 0.0  # of training steps (sampling, scoring, updates, refit); evaluations are not counted
    rollouts: int = 0  # sampled
    tokens: int = 0  # that the engine computes: sampled ones, and each group's prompt once

    def used(self, spent: dict[str, float]) -> float:
        """The largest share of a limit that is used up; spent: by the names of the limits."""
        limits = dataclasses.asdict(self)
        return max(spent[name] / limit for name, limit in limits.items() if limit)


@dataclass(frozen=True)
class Evaluation:
    points: int  # evaluations after the start, evenly over the budget; the last is at the end
    trained: int  # samples of each trained prompt
    unseen: int  # samples of each unseen prompt
    final_unseen: int  # the same at the start and at the end
    k: int  # of pass@k beside pass@1; null where a prompt has fewer samples
    support: int  # samples of each trained prompt at the start and at the end: prompts lost and gained; 0 = none


@dataclass(frozen=True)
class Arm:
    name: str
    n: int  # rollouts per prompt
    prompts: int  # per step; a step that takes a prompt twice has two groups of it
    lr: float = 0.0  # the middle of the rates that are tried
    rate_of: str = ""  # the arm whose rate it takes instead
    bins: tuple[str, ...] = ()  # that it is tested on; () = all
    overrides: tuple[str, ...] = ()  # of the configuration: "algo.mini_batches=1", "rollout.refills=8"


@dataclass(frozen=True)
class Tuning:
    """An arm's rate is the one with the largest mean area under its curve; of equal ones the lower."""

    factors: tuple[float, ...]  # that an arm's lr is multiplied by
    bins: tuple[str, ...]  # whose prompts the runs train on; the mean is over them and the warm starts
    over: Axis = "seconds"  # of the area
    prompt_set: PromptSet = "trained"


@dataclass(frozen=True)
class Comparison:
    """after - before, paired by warm start. All of them are one family for Holm's correction."""

    before: str
    after: str
    end_point: Literal["area", "final"]  # mean height of the curve, or its end
    over: Axis
    prompt_set: PromptSet
    bins: tuple[str, ...]  # averaged over, before anything is tested
    figure: Literal["pass_at_1", "pass_at_k"] = "pass_at_1"
    phase: Literal["test", "plateau"] = "test"


@dataclass(frozen=True)
class Plateau:
    """An arm goes on at lower and lower rates until that gains nothing; then arms go on from its weights and Adam's
    moments, each at the last rate times the square root of its rollouts per step over those of the first arm."""

    arm: str
    bins: tuple[str, ...]
    arms: tuple[str, ...]
    warm_starts: tuple[int, ...]  # of those of `test`
    cut: float = 0.5  # the rate is multiplied by it after a continuation that gains less than `gain`
    gain: float = 0.01  # of pass@1 on the trained prompts
    most: int = 6  # continuations at most; the plateau is reached with the first at a cut rate that gains less


@dataclass(frozen=True)
class Map:
    """Which of some arms is best at which budget and difficulty, and how near to it the advisor comes.

    The best arm of a cell is that of the other warm starts: the best of the same runs would be so by luck too.
    """

    arms: tuple[str, ...]  # that are candidates, on all bins
    at: tuple[float, ...]  # shares of the budget at which curves are read
    over: Axis = "seconds"
    prompt_set: PromptSet = "trained"
    pilot: str = ""  # the arm whose first steps the advisor is asked with, apart from its runs; "" = it is not asked
    steps: int = 8  # of a pilot


@dataclass(frozen=True)
class Design:
    name: str
    question: str
    claims: tuple[Claim, ...]
    config: dict[str, Any]  # sections of a run's configuration that all runs share, with the tasks
    warm_starts: WarmStarts
    prompts: Prompts
    budget: Budget
    evaluation: Evaluation
    arms: tuple[Arm, ...]
    tuning: Tuning
    comparisons: tuple[Comparison, ...]
    plateau: tuple[Plateau, ...] = ()  # none or one
    maps: tuple[Map, ...] = ()  # none or one
    order_seed: int = 0  # of the order of runs
    processes: int = 2  # ranks of a run
    level: float = 0.05  # that the family of comparisons is held to
    mixed_model: bool = True  # fit one per bin; needs statsmodels

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def bins_of(self, arm: Arm) -> tuple[str, ...]:
        """The bins that an arm is tested on."""
        return arm.bins or tuple(b.name for b in self.prompts.bins)

    def run_config(self, overrides: Iterable[str]) -> Config:
        """The configuration of a run. Raises UserError naming the key that is wrong."""
        return load_table(copy.deepcopy(self.config), f"design {self.name}: config", list(overrides))


def read(path: Path) -> Design:
    """A checked design. Raises UserError naming the file and the key that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}; name the TOML file of a design") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid TOML: {shown(e)}") from None
    design: Design = build(Design, table, str(path), "")
    fault = _fault(design)
    if fault:
        raise UserError(f"{path}: {fault}")
    return design


def canonical(design: Design) -> str:
    """The design with all defaults, as JSON that does not depend on how its file is written."""
    table = dataclasses.asdict(design)
    if not design.maps:  # younger than the first designs, whose hashes stay
        del table["maps"]
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(design: Design) -> str:
    """Of the canonical form."""
    return hashlib.sha256(canonical(design).encode()).hexdigest()


def _fault(d: Design) -> str:
    """What is wrong across keys, in words; empty where nothing is."""
    bins, arms = [b.name for b in d.prompts.bins], [a.name for a in d.arms]
    if again := _repeated(bins) or _repeated(arms):
        return f"{again!r} is declared twice"
    # Names that stand for something.
    uses = [
        *(("tuning.bins", name, bins) for name in d.tuning.bins),
        *((f"arms ({a.name}).bins", name, bins) for a in d.arms for name in a.bins),
        *((f"arms ({a.name}).rate_of", a.rate_of, arms) for a in d.arms if a.rate_of),
        *(("comparisons.bins", name, bins) for c in d.comparisons for name in c.bins),
        *(("comparisons", name, arms) for c in d.comparisons for name in (c.before, c.after)),
        *(("plateau", name, arms) for p in d.plateau for name in (p.arm, *p.arms)),
        *(("plateau.bins", name, bins) for p in d.plateau for name in p.bins),
        *(("maps", name, arms) for m in d.maps for name in (*m.arms, *filter(None, [m.pilot]))),
    ]
    for key, name, known in uses:
        if name not in known:
            return f"{key}: {name!r} is none of {', '.join(known)}"
    return _numbers(d) or _comparisons(d) or _maps(d)


def _numbers(d: Design) -> str:
    w, p, e = d.warm_starts, d.prompts, d.evaluation
    shared = set(w.tune) & set(w.test)
    if shared or not w.test or not w.tune:
        return f"warm_starts: tune and test need seeds of their own, and share {sorted(shared)}"
    if _repeated(w.test) or _repeated(w.tune):
        return "warm_starts: a seed occurs twice; a warm start counts once"
    if not any(dataclasses.asdict(d.budget).values()):
        return "budget: no limit is set; a run would not end"
    ranges = sorted((b.least, b.most, b.name) for b in p.bins)
    for (_, most, name), (least, _, other) in itertools.pairwise(ranges):
        if least <= most:
            return f"prompts.bins: {name} and {other} overlap; a prompt has one bin"
    if any(not 0 <= least <= most <= p.samples for least, most, _ in ranges):
        return f"prompts.bins: least and most must be within 0 to prompts.samples = {p.samples}"
    if e.points < 1 or min(e.trained, e.unseen, e.final_unseen) < 1 or e.k < 1 or e.trained < e.k:
        return "evaluation: points, samples and k must be at least 1, and trained at least k"
    if d.config.get("optim", {}).get("lr_for_rollouts"):
        return "config.optim.lr_for_rollouts: rates are declared as they stand; leave it out"
    for a in d.arms:
        if (a.lr > 0) == bool(a.rate_of):
            return f"arms ({a.name}): give lr, or rate_of another arm"
        if a.rate_of and d.arm(a.rate_of).rate_of:
            return f"arms ({a.name}): rate_of {a.rate_of}, which has no rate of its own"
    return ""


def _comparisons(d: Design) -> str:
    if not d.comparisons:
        return "comparisons: none is declared; what is compared is said before the runs"
    for c in d.comparisons:
        if c.before == c.after or not c.bins:
            return f"comparisons: {c.before} and {c.after} must differ, and bins name at least one"
        if c.phase == "plateau":
            if (
                not d.plateau
                or not {c.before, c.after} <= set(d.plateau[0].arms)
                or set(c.bins) - set(d.plateau[0].bins)
            ):
                return f"comparisons: {c.before} and {c.after} do not go on from the plateau on {', '.join(c.bins)}"
            continue
        for arm in (c.before, c.after):
            missing = set(c.bins) - set(d.bins_of(d.arm(arm)))
            if missing:
                return f"comparisons: {arm} is not tested on {sorted(missing)[0]}"
    if len(d.plateau) > 1:
        return "plateau: one at most"
    if d.plateau and set(d.plateau[0].warm_starts) - set(d.warm_starts.test):
        return "plateau.warm_starts: seeds of warm_starts.test alone"
    return ""


def _maps(d: Design) -> str:
    if len(d.maps) > 1:
        return "maps: one at most"
    for m in d.maps:
        if len(m.arms) < 2 or any(d.arm(name).bins for name in m.arms):
            return "maps: two arms at least, each tested on all bins"
        if not m.at or not all(0 < share <= 1 for share in m.at):
            return "maps.at: shares of the budget, above 0 and at most 1"
        if len(d.warm_starts.test) < 2:
            return "maps: the best arm is that of the other warm starts, and there is one alone"
        if m.steps < 1:
            return "maps.steps: must be at least 1"
    return ""


def _repeated(names: Sequence[Any]) -> Any:
    return next((name for i, name in enumerate(names) if name in names[:i]), "")
