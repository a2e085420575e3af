"""Spikes: a step whose loss, gradient norm or KL lies far above what the last steps had.

The reference is the median, which a few spikes do not move; a level that stays becomes the reference after half a
window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from megatron_brorl.config.schema import TrainConfig
from megatron_brorl.errors import UserError

# Figures that are watched, by absolute value, each with what it must exceed besides: below that it is rounding, or the
# rest of terms that cancel.
WATCHED = {"loss": 1e-2, "grad_norm": 0.0, "approx_kl": 1e-4, "logprob_gap_mean": 1e-3}


@dataclass
class Spikes:
    """What a run remembers of its steps to tell a spike; part of its checkpoints."""

    last: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WATCHED})  # the oldest first
    in_a_row: int = 0  # steps with a spike, up to the last one

    def watch(self, metrics: dict[str, float], config: TrainConfig) -> list[str]:
        """Count one more step, whose metrics get their "spikes"; returns what is to be said of each.

        A spike is |x| > train.spike_factor times the median of the last train.spike_window values of |x|, of which half
        must be there. Steps without an update, and values that are not finite, are left out of account (train.finite).
        """
        if not config.spike_factor:
            return []
        found: list[str] = []
        for name, least in WATCHED.items():
            # A gap is not measured where rollout.top_p or top_k cut the distribution.
            value, before = abs(metrics.get(name, math.nan)), self.last[name]
            if not metrics["updates"] or not math.isfinite(value):
                continue

            # Against those before it, of which it is one afterwards.
            middle = median(before) if 2 * len(before) >= config.spike_window else 0.0
            if middle and value > least and value > config.spike_factor * middle:
                times = f"{value / middle:.1f} times the median of the last {len(before)} steps, {middle:.4g}"
                found.append(
                    f"spike: {name} = {metrics[name]:.4g} is {times} (train.spike_factor = {config.spike_factor:g})"
                )
            self.last[name] = [*before, value][-config.spike_window :]
        metrics["spikes"] = float(len(found))
        self.in_a_row = self.in_a_row + 1 if found else 0
        return found

    def too_many(self, config: TrainConfig) -> bool:
        """Whether train.max_spike_steps ends the run."""
        return bool(config.spike_factor) and 0 < config.max_spike_steps <= self.in_a_row

    def check(self, config: TrainConfig, state: str) -> None:
        """Raise UserError where it does. state: what is saved of the run."""
        if self.too_many(config):
            raise UserError(
                f"{self.in_a_row} steps in a row (train.max_spike_steps = {config.max_spike_steps}) had a spike of "
                f"loss, gradient norm or KL (spikes in metrics.jsonl, named above): {state}; look at what these steps "
                "trained on (brorl rollouts), and go on with a higher limit or start anew with a lower learning rate"
            )
