"""Scored rollouts as a few large tensors, as a checkpoint holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from megatron_brorl.types import FinishReason, Rollout, ScoredRollout, ScoreResult

_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)


def to_tensors(rows: Sequence[ScoredRollout]) -> dict[str, Tensor]:
    """Any number of rows in a few tensors; files cost per object.

    heads [B, 7] int64: group, sibling, tokens, finish, spans, right, answer. token_ids [sum of tokens] int64, log_probs
    likewise float32, spans [sum of spans, 2] int64, rewards [B] float32. verdicts [bytes] uint8: as JSON, each distinct
    one once; verdict [B] int64: which of them, -1: none.
    """
    rollouts = [row.rollout for row in rows]
    heads = [
        (row.group, r.index, len(r.token_ids), _FINISH.index(r.finish), len(r.spans), row.right, row.answer)
        for row, r in zip(rows, rollouts, strict=True)
    ]
    spans = [span for r in rollouts for span in r.spans]
    # Equal answers share a verdict, object and all.
    distinct = {id(row.score): row.score for row in rows if row.score}
    place = {key: i for i, key in enumerate(distinct)}
    texts = [(v.reward, v.status, v.reason, dict(v.parts)) for v in distinct.values()]
    return {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 7),
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(r.token_ids for r in rollouts)]),
        "log_probs": torch.cat([torch.zeros(0), *(r.log_probs for r in rollouts)]),
        "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
        "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "verdicts": torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8),
        "verdict": torch.tensor([place.get(id(row.score), -1) for row in rows], dtype=torch.int64),
    }


def from_tensors(tensors: Mapping[str, Tensor]) -> list[ScoredRollout]:
    """The rows of to_tensors, bit for bit, in order: token_ids and log_probs [G] are views of the large ones."""
    heads = tensors["heads"].tolist()
    lengths = [head[2] for head in heads]
    ids, log_probs = tensors["token_ids"].split(lengths), tensors["log_probs"].split(lengths)
    spans = tensors["spans"].tolist()
    texts = json.loads(bytes(tensors["verdicts"].tolist()))
    verdicts = [*(ScoreResult(*each) for each in texts), None]  # entry -1: none
    rows, at = [], 0
    for (group, sibling, _, finish, count, right, answer), i, lp, reward, v in zip(
        heads, ids, log_probs, tensors["rewards"].tolist(), tensors["verdict"].tolist(), strict=True
    ):
        own = tuple((version, tokens) for version, tokens in spans[at : at + count])
        rollout = Rollout(sibling, i, lp, _FINISH[finish], own)
        rows.append(ScoredRollout(group, rollout, reward, bool(right), answer, verdicts[v]))
        at += count
    return rows


def in_order(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """By group, then by sibling."""
    return sorted(rows, key=lambda row: (row.group, row.rollout.index))
