"""Live mass balance: the probability mass that a step left unsampled, and the terms of Theorem 1 at single positions.

Metrics are named theory_KIND/NAME; KIND is exact, bound, estimate, hold_out or good_turing (docs/theory.md). They are
equal on every rank and do not influence training. Only the first tokens of a few prompts' responses cross replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.config.schema import Config
from megatron_brorl.ops.philox import stream_key, uniforms
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.parallel import collectives, cpu_bridge
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.theory.token_level import Positions, TokenLevel, draw_positions, token_level
from megatron_brorl.theory.unsampled_mass import good_turing, hold_out
from megatron_brorl.train.collect import Collected
from megatron_brorl.train.groups import Outcomes
from megatron_brorl.train.worker import Worker

MAX_POSITION = 32  # positions are among the first tokens of a response, because siblings soon diverge
PROMPTS = 8  # of a step that are analysed token by token
POSITIONS = 8  # per prompt at which the full softmax is computed
_KINDS = {
    **dict.fromkeys(("unsampled_mass", "unsampled_2", "s_r", "a2", "b2", "siblings"), "exact"),
    **dict.fromkeys(("success", "sampled", "policy_gradient"), "estimate"),
    **dict.fromkeys(("unsampled_low", "unsampled_high"), "bound"),
}
_NAMES = [f.name for f in fields(TokenLevel)]


def mass_balance_metrics(
    config: Config, step: int, collected: Collected, worker: Worker, sampling: Sampling
) -> dict[str, float]:
    """Return the theory metrics of a step, or none if theory.every skips it; a collective."""
    if not config.theory.every or step % config.theory.every:
        return {}
    metrics = answer_metrics(collected.outcomes, config.rollout.n)
    # The first tokens of agents' rollouts follow prompts of their own, and the replicas have only the rollouts of
    # algo.train_on, which are not a random sample.
    is_sample = not (config.agent.function or config.algo.train_on)
    if collected.outcomes.kept and is_sample:
        metrics |= _TokenMetrics(config, step, collected, worker, sampling).compute()
    return metrics


@dataclass
class _TokenMetrics:
    """The mass balance at random positions of some trained prompts."""

    config: Config
    step: int
    collected: Collected
    worker: Worker
    sampling: Sampling

    def __post_init__(self) -> None:
        kept = self.collected.outcomes.kept
        numbers = self._uniforms(len(kept), purpose=0).tolist()
        self.chosen = sorted(g for _, g in sorted(zip(numbers, kept, strict=True))[:PROMPTS])

    def compute(self) -> dict[str, float]:
        """Return means over the shared tokens of the chosen groups."""
        tokens, sampled = self._first_tokens()
        # All ranks draw the same positions.
        numbers = self._uniforms(len(tokens) * POSITIONS, purpose=1).view(len(tokens), -1)
        drawn = [draw_positions(ids, u, mask) for ids, u, mask in zip(tokens, numbers, sampled, strict=True)]
        levels = self._at_positions(tokens, drawn)

        outcomes = self.collected.outcomes
        sampled_tokens = [float(outcomes.sampled[g][outcomes.ended[g]].sum()) for g in self.chosen]
        shared_tokens = sum(positions.shared for positions in drawn)
        metrics = {"theory_exact/shared_tokens": shared_tokens / (sum(sampled_tokens) or 1.0)}

        # Groups are weighted by their shared tokens. A position with an unknown value (nan) does not count.
        groups = [(p.shared, level) for p, level in zip(drawn, levels, strict=True) if p.shared]
        names = _NAMES if groups else []
        for name in names:
            values = [(shared, getattr(level, name)) for shared, level in groups]
            weight = sum(shared * float(x.isfinite().double().mean()) for shared, x in values)
            total = sum(shared * float(x.nan_to_num(0.0).mean()) for shared, x in values)
            metrics[f"theory_{_KINDS[name]}/{name}"] = total / weight if weight else math.nan
        return metrics

    def _first_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the first tokens of every response of the chosen groups, and whether the model sampled them.

        Both are [groups, N, MAX_POSITION]. The tokens are padded with -1.
        """
        row_of = {g: i for i, g in enumerate(self.chosen)}
        table = torch.zeros(len(self.chosen), self.config.rollout.n, MAX_POSITION, dtype=torch.int64)
        for r in self.collected.rollouts:
            if r.group in row_of:
                ids = r.token_ids[:MAX_POSITION]
                sign = 1 if r.sampled is None else r.sampled[:MAX_POSITION] * 2 - 1
                # 0 is padding, and tokens of an environment are negative.
                table[row_of[r.group], r.index, : len(ids)] = sign * (ids + 1)
        # The tokens of each rollout are on one replica and 0 on the others, so the sum is the table of all replicas.
        table = collectives.all_reduce_tensor(table, group=self.worker.grid.groups.dp)
        return table.abs() - 1, table > 0

    def _at_positions(self, tokens: Tensor, drawn: Sequence[Positions]) -> list[TokenLevel]:
        """Return the result of `token_level` for the positions of each chosen group, on every rank."""
        # Each position is one row: the prompt and the tokens before the position.
        prompts: list[Tensor] = []
        responses: list[Tensor] = []
        arguments = []  # of token_level by group: position, next token and correctness of each sibling there
        for g, ids, p in zip(self.chosen, tokens, drawn, strict=True):
            position, sibling = p.together.nonzero().unbind(1)
            right = self.collected.outcomes.right[g, sibling].double()
            arguments.append((len(prompts) + position, ids[sibling, p.depth[position]], right))
            prompts += [torch.tensor(self.collected.groups[g].prompt.token_ids)] * len(p.depth)
            # last_logits returns the distribution of the last token of a row.
            responses += [ids[i, : depth + 1] for i, depth in zip(p.sibling.tolist(), p.depth.tolist(), strict=True)]

        # The last pipeline stage has the logits and broadcasts the results to the other stages.
        table = torch.zeros(len(_NAMES), len(prompts), dtype=torch.float64)
        if prompts:
            logits = self.worker.last_logits(prompts, responses)
            if logits is not None:
                s = self.sampling
                # The engine sampled from the distribution after temperature, top-p and top-k.
                log_probs = sampling_log_probs(logits, s.temperature, s.top_p, s.top_k)
                theory = token_level(log_probs, *(torch.cat(column) for column in zip(*arguments, strict=True)))
                table = torch.stack([getattr(theory, name) for name in _NAMES])
            table = table.to(cpu_bridge.default_device())
            grid = self.worker.grid
            dist.broadcast(table, dist.get_global_rank(grid.groups.pp, grid.pp_size - 1), group=grid.groups.pp)
            table = table.cpu()

        by_group = table.split([len(p.depth) for p in drawn], dim=1)
        return [TokenLevel(**dict(zip(_NAMES, part, strict=True))) for part in by_group]

    def _uniforms(self, count: int, purpose: int) -> Tensor:
        """Return float64 numbers [count] in (0, 1) that depend on seed, step and the arguments only."""
        key = stream_key(self.config.run.seed, "theory", self.step)
        return uniforms(torch.full((count,), key), torch.arange(count), torch.full((count,), purpose))


def answer_metrics(outcomes: Outcomes, n: int) -> dict[str, float]:
    """Return Good-Turing and hold-out estimates of the unsampled mass of final answers, as means over closed groups.

    Groups with at most n / 2 survivors do not count, because n / 2 siblings cannot be held out from them.
    """
    groups = []
    for g in outcomes.closed:
        ended = outcomes.ended[g]
        if int(ended.sum()) > max(n // 2, 2):
            groups.append((outcomes.answers[g][ended].numpy(), outcomes.right[g][ended].numpy()))
    if not groups:
        return {}
    unseen = [good_turing(answers, right) for answers, right in groups]
    names = [f.name for f in fields(unseen[0])]
    metrics = {f"theory_good_turing/{name}": float(np.mean([getattr(u, name) for u in unseen])) for name in names}

    sizes = [2**k for k in range(1, n.bit_length()) if 2**k <= n // 2]
    if sizes:
        for name, columns in hold_out(groups, sizes).items():
            for h, value, low, high in zip(sizes, *columns.tolist(), strict=True):
                key = f"theory_hold_out/{name}_{h}"
                metrics |= {key: value, f"{key}_low": low, f"{key}_high": high}
    return metrics
