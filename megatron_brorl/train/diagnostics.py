"""What a step's siblings left unsampled, what the theory makes of it, and what the update did to the same prompts.

Metrics are named theory_HOW/WHAT, where HOW is how they are known: exact, bound, estimate, hold_out, good_turing,
predicted, measured (docs/theory.md says what each one is). All are the same on every rank, and none has a part in
training. Beside what training has exchanged, only the first tokens of a few prompts' responses cross replicas.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_brorl.config.schema import Config, TheoryConfig
from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.parallel import device
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.theory.advisor import spread
from megatron_brorl.theory.agreement import PREDICTIONS, correlation
from megatron_brorl.theory.diagnostics import answer_level, good_turing, hold_out
from megatron_brorl.theory.positions import Positions, change_of_success, draw_positions, draws_at
from megatron_brorl.theory.token_level import TokenLevel, token_level
from megatron_brorl.train.collect import Collected
from megatron_brorl.train.evaluate import sample_answers
from megatron_brorl.train.gradient_noise import noise_metrics
from megatron_brorl.train.groups import Outcomes
from megatron_brorl.train.rollouts import Rollouts
from megatron_brorl.train.worker import Worker

_EXACT = ("unsampled_mass", "unsampled_2", "s_r", "a2", "b2", "siblings")
_ESTIMATE = ("success", "sampled", "policy_gradient")
_BOUND = ("unsampled_low", "unsampled_high")
_LABELS = {**dict.fromkeys(_EXACT, "exact"), **dict.fromkeys(_ESTIMATE, "estimate"), **dict.fromkeys(_BOUND, "bound")}
_NAMES = [f.name for f in fields(TokenLevel)]


@dataclass
class StepDiagnostics:
    """The diagnostics of one step: before_update, diagnose and after_update in this order, all of them collectives."""

    config: TheoryConfig
    step: int
    collected: Collected
    n: int  # rollouts that every prompt has at least, but for lost ones
    worker: Worker
    rollouts: Rollouts
    sampling: Sampling
    overlong_filter: bool = False  # config key algo.overlong_filter
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by phase
    _rates: npt.NDArray[np.float64] | None = None  # pass@1 of the chosen prompts before the update
    _predicted: dict[str, list[float]] = field(default_factory=dict)  # change of each one's pass@1 per unit of step

    def __post_init__(self) -> None:
        """Choose the prompts that are looked at one by one: some of those that are trained on."""
        kept = self.collected.outcomes.kept
        draws = self._uniforms(0, len(kept)).tolist()
        self.chosen = sorted(g for _, g in sorted(zip(draws, kept, strict=True))[: self.config.prompts])

    def before_update(self) -> None:
        """While the engine has the weights that sampled: pass@1 of the chosen prompts, where it is measured."""
        due = self.config.measure_every and self.step % self.config.measure_every == 0
        if due and self.chosen:
            self._rates = self._measure()

    def diagnose(self) -> dict[str, float]:
        """Metrics of the rollouts, before the update."""
        begun = time.monotonic()
        metrics = answer_metrics(self.collected.outcomes, self.n)
        if self.chosen:
            answers = [_answers(self.collected.outcomes, g) for g in self.chosen]
            # What any prediction has to beat: s (1 - s) knows neither tokens nor answers.
            right, n = np.array([int(r.sum()) for _, r in answers]), np.array([len(r) for _, r in answers])
            self._predicted = {
                "answers": [answer_level(*pair).change for pair in answers],
                "spread": spread(right, n).tolist(),
            }
            if self.config.positions:
                metrics |= self._token_metrics()
        self.seconds["diagnose"] += time.monotonic() - begun
        if self.config.noise_every and self.step % self.config.noise_every == 0:
            metrics |= self._noise()
        return metrics

    def after_update(self, lr: float) -> dict[str, float]:
        """Predicted and measured change of pass@1, when the engine has the new weights.

        lr: the learning rates of the step's updates, added up; predicted is a plain gradient step of this size.
        """
        metrics = {f"theory_predicted/{k}": lr * float(np.mean(v)) for k, v in self._predicted.items()}

        # Measured once more with the same random numbers; None where this step measures nothing or an engine hangs.
        rates = None if self._rates is None else self._measure()
        if rates is None or self._rates is None:
            return metrics

        # A prompt whose samples were all lost counts for neither.
        known = np.isfinite(rates - self._rates)
        change = (rates - self._rates)[known]
        if not len(change):
            return metrics

        # Means over prompts; samples are those of both measurements.
        metrics |= {
            "theory_measured/before": float(self._rates[known].mean()),
            "theory_measured/after": float(rates[known].mean()),
            "theory_measured/change": float(change.mean()),
            "theory_measured/samples": 2.0 * len(self.chosen) * self.config.measure_samples,
        }

        # The spread over prompts, and whether the theory knew which ones change.
        if len(change) > 1:
            metrics["theory_measured/change_se"] = float(change.std(ddof=1)) / len(change) ** 0.5
        # Predictions are per unit of step: a correlation does not ask how large the step was.
        for name in PREDICTIONS:
            if name in self._predicted:
                r = correlation(np.asarray(self._predicted[name])[known], change)
                metrics[f"theory_measured/over_prompts_{name}"] = r

        return metrics

    def _measure(self) -> npt.NDArray[np.float64] | None:
        """pass@1 of the chosen prompts [C]; nan where all samples were lost, None where an engine no longer answers.

        By random numbers of their own, and the same before and after the update: fresh ones, because a policy is
        trained on what it has sampled; the same, because that takes most of the noise out of the difference.
        """
        if self.rollouts.stuck():
            return None
        begun = time.monotonic()
        prompts = [self.collected.groups[g].prompt for g in self.chosen]
        sampling = replace(self.sampling, budget=0, log_probs=False)
        answers = sample_answers(self.rollouts, prompts, self.config.measure_samples, sampling, f"theory {self.step}")
        rates = {a.place: a.right / a.samples for a in answers}
        self.seconds["measure"] += time.monotonic() - begun
        return np.array([rates.get(place, np.nan) for place in range(len(prompts))])

    def _noise(self) -> dict[str, float]:
        """The noise of the gradient at the weights that sampled."""
        begun = time.monotonic()
        draws = self._uniforms(2, len(self.collected.groups))
        limits = self.config.prompts, self.worker, self.sampling.temperature, self.overlong_filter
        found = noise_metrics(self.collected, draws, *limits)
        self.seconds["noise"] += time.monotonic() - begun
        return found

    def _token_metrics(self) -> dict[str, float]:
        """Means over the chosen groups' shared tokens; also predicts for each of these groups."""
        tokens = self._first_tokens()
        # Positions are drawn by numbers that all ranks have, so that all look at the same ones.
        draws = self._uniforms(1, len(tokens) * self.config.positions).view(len(tokens), -1)
        drawn = [draw_positions(t, u) for t, u in zip(tokens, draws, strict=True)]
        found = self._at_positions(tokens, drawn)

        # What the theorem and a plain gradient step predict for each prompt.
        survivors = [int((t[:, 0] >= 0).sum()) for t in tokens]
        for name, change in {
            "theorem": lambda f: f.sampled + (f.unsampled_low + f.unsampled_high) / 2,
            "theorem_low": lambda f: f.sampled + f.unsampled_low,
            "theorem_high": lambda f: f.sampled + f.unsampled_high,
            "policy_gradient": lambda f: f.policy_gradient,
        }.items():
            # A zip is spent by one walk, so that every prediction makes its own.
            parts = zip(drawn, found, survivors, strict=True)
            self._predicted[name] = [change_of_success(p, change(f), f, n) for p, f, n in parts]

        # How much of what survivors wrote begins like a sibling, which is all that these figures are about.
        outcomes = self.collected.outcomes
        tokens_of = [float(outcomes.tokens[g][outcomes.ended[g]].sum()) for g in self.chosen]
        shared = sum(p.shared for p in drawn)
        metrics = {"theory_exact/shared_tokens": shared / (sum(tokens_of) or 1.0)}

        # Each group weighs by its shared tokens; one without any has no position to take a mean over.
        for name in _NAMES if shared else ():
            groups = [(p.shared, getattr(f, name)) for p, f in zip(drawn, found, strict=True) if p.shared]
            # Where a figure is unknown at a position, the position does not count.
            weight = sum(w * float(x.isfinite().double().mean()) for w, x in groups)
            total = sum(w * float(x.nan_to_num(0.0).mean()) for w, x in groups)
            metrics[f"theory_{_LABELS[name]}/{name}"] = total / weight if weight else math.nan

        return metrics

    def _first_tokens(self) -> list[Tensor]:
        """The first `depth` tokens of every response of each chosen group [N, depth], -1 where there is none."""
        place = {g: i for i, g in enumerate(self.chosen)}
        depth = self.config.max_position
        table = torch.zeros(len(self.chosen), self.collected.outcomes.state.shape[1], depth, dtype=torch.int64)
        mine = [r for r in self.collected.rollouts if r.group in place]
        if mine:
            ids = pad_sequence([r.rollout.token_ids[:depth] for r in mine], batch_first=True, padding_value=-1)
            at = [place[r.group] for r in mine], [r.rollout.index for r in mine]
            table[at[0], at[1], : ids.shape[1]] = ids + 1
        table = table.to(device.default_device())
        # A rollout is on one replica, so that its tokens are only added to zeros.
        dist.all_reduce(table, group=self.worker.grid.groups.dp)
        return list(table.cpu() - 1)

    def _at_positions(self, tokens: Sequence[Tensor], drawn: Sequence[Positions]) -> list[TokenLevel]:
        """theory.diagnostics.token_level at the positions of each chosen group, on every rank."""
        # A position is the prompt and the tokens up to it, as a row of its own.
        prompts: list[Tensor] = []
        responses: list[Tensor] = []
        parts = []
        # Rows are numbered through all groups, so that the model sees one batch.
        for g, t, p in zip(self.chosen, tokens, drawn, strict=True):
            position, token, right = draws_at(p, t, self.collected.outcomes.right[g])
            parts.append((len(prompts) + position, token, right))
            prompts += [torch.tensor(self.collected.groups[g].prompt.token_ids)] * len(p.depth)
            # The token at the position closes its row: last_logits tells what that was drawn from.
            responses += [t[i, : d + 1] for i, d in zip(p.sibling.tolist(), p.depth.tolist(), strict=True)]

        # The last pipeline stage has the logits, and tells the others.
        # Of the type and size of TokenLevel's fields on every stage, as a broadcast asks.
        table = torch.zeros(len(_NAMES), len(prompts), dtype=torch.float64)
        if prompts:
            logits = self.worker.last_logits(prompts, responses)
            if logits is not None:
                s = self.sampling
                # The distribution of the sampling, cut by top-p and top-k as the engine's was.
                log_probs = sampling_log_probs(logits, s.temperature, s.top_p, s.top_k)
                found = token_level(log_probs, *(torch.cat(part) for part in zip(*parts, strict=True)))
                table = torch.stack([getattr(found, name) for name in _NAMES])
            table = _from_last_stage(table, self.worker.grid)

        # Back to one table per group, in the order of `drawn`.
        columns = table.split([len(p.depth) for p in drawn], dim=1)
        return [TokenLevel(**dict(zip(_NAMES, part, strict=True))) for part in columns]

    def _uniforms(self, purpose: int, count: int) -> Tensor:
        """float64 [count] in (0, 1), a function of seed, step and arguments alone."""
        key = stream_key(self.rollouts.seed, "theory", self.step)
        return uniforms(torch.full((count,), key), torch.arange(count), torch.full((count,), purpose))


def diagnostics_where_due(
    config: Config, step: int, collected: Collected, worker: Worker, rollouts: Rollouts, sampling: Sampling
) -> StepDiagnostics | None:
    """The diagnostics of this step, where theory.every has it."""
    t = config.theory
    if not t.every or step % t.every:
        return None
    return StepDiagnostics(
        t, step, collected, config.rollout.n, worker, rollouts, sampling, config.algo.overlong_filter
    )


def answer_metrics(outcomes: Outcomes, n: int) -> dict[str, float]:
    """Good-Turing, hold-out and the theorem's terms on final answers, as means over closed groups.

    Groups with at most half of n siblings left are not counted: they cannot hold out as many as the others.
    """
    groups = [pair for g in outcomes.closed if len((pair := _answers(outcomes, g))[0]) > max(n // 2, 2)]
    if not groups:
        return {}
    # Unseen mass by Good-Turing, and the theorem's terms on answers in place of tokens, group by group.
    unseen, levels = [good_turing(*pair) for pair in groups], [answer_level(*pair) for pair in groups]

    # Means over groups.
    names = [f.name for f in fields(unseen[0])]
    metrics = {f"theory_good_turing/{k}": float(np.mean([getattr(u, k) for u in unseen])) for k in names}
    for name in ("s_r", "a2", "b2", "sampled", "unsampled"):
        metrics[f"theory_hold_out/{name}"] = float(np.mean([getattr(level, name) for level in levels]))

    # The hold-out curve at powers of two.
    # Every counted group has more than n // 2 answers, so that all of them can hold out as many.
    held = [2**k for k in range(1, n.bit_length()) if 2**k <= n // 2]
    if held:
        curve = hold_out(groups, held)
        for name in ("unsampled_mass", "u_pos2", "u_neg2"):
            # Every point with its interval over draws of siblings, the prompts being given.
            columns = (getattr(curve, name + end).tolist() for end in ("", "_low", "_high"))
            for h, value, low, high in zip(held, *columns, strict=True):
                key = f"theory_hold_out/{name}_{h}"
                metrics |= {key: value, f"{key}_low": low, f"{key}_high": high}

    return metrics


def _answers(outcomes: Outcomes, group: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Codes of the final answers and verdicts of a group's survivors, in sibling order."""
    ended = outcomes.ended[group]
    return outcomes.answers[group][ended].numpy(), outcomes.right[group][ended].numpy()


def _from_last_stage(table: Tensor, grid: Grid) -> Tensor:
    if grid.pipeline == 1:
        return table
    table = table.to(device.default_device())
    dist.broadcast(table, dist.get_global_rank(grid.groups.pp, grid.pipeline - 1), group=grid.groups.pp)
    return table.cpu()
