"""Scored rollouts as a few large tensors, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from megatron_brorl.types import FinishReason, Rollout, ScoredRollout

_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)


def to_tensors(rows: Sequence[ScoredRollout]) -> dict[str, Tensor]:
    """Any number of rows in five tensors; files cost per object.

    heads [B, 6] int64: group, sibling, tokens, finish, spans, answer. token_ids [sum of tokens] int64, log_probs
    likewise float32, spans [sum of spans, 2] int64, rewards [B] float32.
    """
    rollouts = [row.rollout for row in rows]
    heads = [
        (row.group, r.index, len(r.token_ids), _FINISH.index(r.finish), len(r.spans), row.answer)
        for row, r in zip(rows, rollouts, strict=True)
    ]
    spans = [span for r in rollouts for span in r.spans]
    return {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 6),
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(r.token_ids for r in rollouts)]),
        "log_probs": torch.cat([torch.zeros(0), *(r.log_probs for r in rollouts)]),
        "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
        "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> list[ScoredRollout]:
    """The rows of to_tensors, bit for bit, in order: token_ids and log_probs [G] are views of the large ones."""
    heads = tensors["heads"].tolist()
    lengths = [head[2] for head in heads]
    ids, log_probs = tensors["token_ids"].split(lengths), tensors["log_probs"].split(lengths)
    spans = tensors["spans"].tolist()
    rows, at = [], 0
    for (group, sibling, _, finish, count, answer), i, lp, reward in zip(
        heads, ids, log_probs, tensors["rewards"].tolist(), strict=True
    ):
        own = tuple((version, tokens) for version, tokens in spans[at : at + count])
        rows.append(ScoredRollout(group, Rollout(sibling, i, lp, _FINISH[finish], own), reward, answer))
        at += count
    return rows


def in_order(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """By group, then by sibling."""
    return sorted(rows, key=lambda row: (row.group, row.rollout.index))
