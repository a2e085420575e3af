"""Packing of (prompt, response) rows of different lengths into streams without padding.

A plain stream is [prompt response | prompt response | ...]. A shared stream is [prompt | response | response | ... |
next prompt | ...]: all responses to a prompt attend to one copy of it, and their positions continue from its end. The
model therefore processes a prompt once per micro-batch. Rows are sorted by length, so that attention over rows of equal
length is a batched call on a view of the stream. The last token of a row predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.parallel.cpu_bridge import to_device

# Prompts are shared if that reduces the tokens by this factor. Otherwise attention over short pieces costs more.
MIN_SHARING_GAIN = 1.1


@dataclass(frozen=True)
class PackedGroup:
    """Consecutive part of a stream: a prompt and several responses to it, or rollouts with a prompt of their own."""

    prefix: int  # tokens of the shared prompt; 0 if every segment includes its own prompt
    segments: tuple[tuple[int, int], ...]  # runs of equally long segments as (count, length), in stream order


@dataclass(frozen=True)
class Packed:
    """One micro-batch: a stream of T tokens that predicts R response tokens."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, starting from 0 in every row
    groups: tuple[PackedGroup, ...]  # in stream order; they cover the stream
    predict: Tensor  # [R] int64, the stream index of the hidden state that predicts each response token
    targets: Tensor  # [R] int64, the response tokens
    rows: tuple[int, ...]  # indices of the packed rows, in stream order
    counts: Tensor  # [rows] int64, the response tokens of each row
    kept: Tensor | None = None  # [R] int64, which response tokens of the rows this rank predicts; None: all of them
    routes: Tensor | None = None  # [T, layers, k], the experts of each token; None: the routers choose them

    def on_device(self) -> Packed:
        """Return the micro-batch with the inputs of the model on the device, copied while it computes."""
        inputs = ("input_ids", "position_ids", "predict", "targets", "routes")
        moved: dict[str, Any] = {name: to_device(x) for name in inputs if (x := getattr(self, name)) is not None}
        return replace(self, **moved)

    def gather(self, per_row: Sequence[Tensor]) -> Tensor:
        """Concatenate ragged per-token values of all rows ([G] each) into [R] in this batch's order."""
        if not self.rows:
            return torch.zeros(0)
        return self._keep(torch.cat([per_row[i] for i in self.rows]))

    def repeat(self, per_row: Tensor) -> Tensor:
        """Repeat each row's value for all response tokens of the row: [B] -> [R]."""
        return self._keep(per_row[list(self.rows)].repeat_interleave(self.counts))

    def _keep(self, values: Tensor) -> Tensor:
        return values if self.kept is None else values[self.kept]

    def last_tokens(self) -> tuple[list[int], Tensor]:
        """Return the K rows whose last response token is among the R, and the index [K] of that token."""
        ends = self.counts.cumsum(0) - 1
        if self.kept is None:
            return list(self.rows), ends
        on_this_rank = torch.isin(ends, self.kept)
        rows = [row for row, is_here in zip(self.rows, on_this_rank.tolist(), strict=True) if is_here]
        return rows, torch.searchsorted(self.kept, ends[on_this_rank])

    def split(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Split per-token values [R] into (row, [G]) pairs, with 0 for tokens of other ranks."""
        if self.kept is not None:
            all_values = values.new_zeros(int(self.counts.sum()), *values.shape[1:])
            values = all_values.index_copy(0, self.kept.to(values.device), values)
        return list(zip(self.rows, values.split(self.counts.tolist()), strict=True))


def pack(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    max_tokens: int,
    multiple_of: int = 1,
    share: bool = False,
    segments_of: int = 1,
    routes: Sequence[Tensor] | None = None,
) -> list[Packed]:
    """Pack rows into micro-batches of at most max_tokens stream tokens. A longer row gets its own micro-batch.

    prompts and responses: [tokens] int64 each, none empty. share: store a prompt once per micro-batch if that reduces
    the tokens by MIN_SHARING_GAIN. multiple_of: pad streams to a multiple of it with one dummy segment, for sequence
    parallelism. segments_of, a divisor of multiple_of: pad each segment to a multiple of it, for context parallelism.
    routes: of each row, [prompt + response - 1, layers, k]. Rows share a prompt only if its routes are equal.
    Without rows the result is one dummy micro-batch, so that the rank takes part in the collectives.
    """
    if share:
        if segments_of > 1:
            raise ValueError("pack: shared prompts do not support segments_of > 1")
        shared = _fill_shared(_by_prompt(prompts, responses, routes), max_tokens)
        if _gain(shared, prompts, responses) >= MIN_SHARING_GAIN:
            return [_pack_shared(batch, multiple_of, routes) for batch in shared]

    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]) + len(responses[i]), i))
    batches: list[list[int]] = [[]]
    used = 0
    for i in order:
        length = len(prompts[i]) + len(responses[i]) - 1
        length += -length % segments_of
        if batches[-1] and used + length > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += length

    return [_pack_plain(rows, prompts, responses, multiple_of, segments_of, routes) for rows in batches]


def token_gain(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], max_tokens: int, routes: Sequence[Tensor] | None = None
) -> float:
    """Return the factor by which sharing prompts reduces the tokens of micro-batches. 1 without rows.

    A prompt counts once in each micro-batch that contains responses to it. The arguments are those of `pack`.
    """
    return _gain(_fill_shared(_by_prompt(prompts, responses, routes), max_tokens), prompts, responses)


def copies_by_routes(prompts: Sequence[Tensor], responses: Sequence[Tensor], routes: Sequence[Tensor] | None) -> int:
    """Return how many rows need a further copy of their prompt, because no earlier row has the same routes of it."""
    return len(_by_prompt(prompts, responses, routes)) - len(_by_prompt(prompts, responses, None)) if routes else 0


# A prompt, and the (row, response) pairs of its responses, sorted by length.
_PromptRows = tuple[Tensor, list[tuple[int, Tensor]]]


def _gain(batches: list[list[_PromptRows]], prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> float:
    response_tokens = sum(len(response) - 1 for response in responses)
    prompt_tokens = sum(len(prompt) for batch in batches for prompt, _ in batch)
    return (response_tokens + sum(map(len, prompts))) / max(response_tokens + prompt_tokens, 1) if responses else 1.0


def _by_prompt(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], routes: Sequence[Tensor] | None
) -> list[_PromptRows]:
    """Group rows by prompt and its routes, in the order of first appearance. Siblings usually share one tensor."""
    # Routes differ if the weights changed between two siblings, or if an engine's results depend on its batch.
    token_ids: dict[int, tuple[int, ...]] = {}  # by id() of the prompt
    rows_of: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
    for i, prompt in enumerate(prompts):
        if id(prompt) not in token_ids:
            token_ids[id(prompt)] = tuple(prompt.tolist())
        prompt_routes = routes[i][: len(prompt)].numpy().tobytes() if routes else b""
        rows_of.setdefault((token_ids[id(prompt)], prompt_routes), []).append(i)
    return [
        (prompts[rows[0]], sorted(((i, responses[i]) for i in rows), key=lambda pair: (len(pair[1]), pair[0])))
        for rows in rows_of.values()
    ]


def _fill_shared(groups: list[_PromptRows], max_tokens: int) -> list[list[_PromptRows]]:
    """Fill micro-batches with rows. If the rows of a prompt do not fit, the next micro-batch repeats the prompt."""
    batches: list[list[_PromptRows]] = [[]]
    used = 0
    for prompt, siblings in groups:
        started = False  # whether this micro-batch has the prompt
        for row, response in siblings:
            cost = len(response) - 1 + (0 if started else len(prompt))
            if batches[-1] and used + cost > max_tokens:
                batches.append([])
                used = 0
                started = False
                cost = len(response) - 1 + len(prompt)

            if not started:
                batches[-1].append((prompt, []))
                started = True
            batches[-1][-1][1].append((row, response))  # to the responses of the newest prompt
            used += cost
    return batches


def _pack_plain(
    rows: list[int],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    multiple_of: int,
    segments_of: int,
    routes: Sequence[Tensor] | None,
) -> Packed:
    rows_of_tokens = [torch.cat((prompts[i], responses[i][:-1])) for i in rows]
    pieces = [torch.nn.functional.pad(tokens, (0, -len(tokens) % segments_of)) for tokens in rows_of_tokens]
    lengths = torch.tensor([len(p) for p in pieces], dtype=torch.int64)
    counts = torch.tensor([len(responses[i]) for i in rows], dtype=torch.int64)

    # The last token of a prompt predicts the first token of the response.
    first = lengths.cumsum(0) - lengths + torch.tensor([len(prompts[i]) - 1 for i in rows], dtype=torch.int64)

    return _finish(
        pieces=pieces,
        offsets=[0] * len(rows),
        groups=[PackedGroup(0, _runs(lengths.tolist()))] if rows else [],
        predict=first.repeat_interleave(counts) + _concatenated_ranges(counts),
        rows=[(i, responses[i]) for i in rows],
        multiple_of=multiple_of,
        routes=[_padded_routes(routes[i], segments_of) for i in rows] if routes else [],
    )


def _pack_shared(groups: list[_PromptRows], multiple_of: int, routes: Sequence[Tensor] | None) -> Packed:
    pieces: list[Tensor] = []
    offsets: list[int] = []
    predict: list[Tensor] = []
    piece_routes: list[Tensor] = []
    end = 0

    for prompt, siblings in groups:
        counts = torch.tensor([len(response) for _, response in siblings])  # response tokens of each sibling
        pieces += [prompt, *(response[:-1] for _, response in siblings)]
        offsets += [0, *([len(prompt)] * len(siblings))]
        if routes:
            piece_routes.append(routes[siblings[0][0]][: len(prompt)])
            piece_routes += [routes[row][len(prompt) :] for row, _ in siblings]

        token_index = _concatenated_ranges(counts)  # index of each token in its response
        end += len(prompt)
        # The last token of the prompt predicts the first token of every sibling.
        starts = end + (counts - 1).cumsum(0) - (counts - 1)
        indices = starts.repeat_interleave(counts) + token_index - 1
        indices[token_index == 0] = end - 1
        predict.append(indices)

        end += int((counts - 1).sum())

    return _finish(
        pieces=pieces,
        offsets=offsets,
        groups=[PackedGroup(len(prompt), _runs([len(ids) - 1 for _, ids in siblings])) for prompt, siblings in groups],
        predict=torch.cat(predict),
        rows=[row for _, siblings in groups for row in siblings],
        multiple_of=multiple_of,
        routes=piece_routes,
    )


def _finish(
    pieces: list[Tensor],
    offsets: list[int],
    groups: list[PackedGroup],
    predict: Tensor,
    rows: list[tuple[int, Tensor]],
    multiple_of: int,
    routes: list[Tensor],
) -> Packed:
    """Concatenate the pieces and append a segment of padding. offsets: first position of each piece."""
    total = sum(map(len, pieces))
    pad = -total % multiple_of if total else multiple_of
    if pad:
        pieces = [*pieces, torch.zeros(pad, dtype=torch.int64)]
        offsets = [*offsets, 0]
        groups = [*groups, PackedGroup(0, ((1, pad),))]

    lengths = torch.tensor([len(p) for p in pieces])
    return Packed(
        input_ids=torch.cat(pieces),
        position_ids=_concatenated_ranges(lengths) + torch.tensor(offsets).repeat_interleave(lengths),
        groups=tuple(groups),
        predict=predict,
        targets=torch.cat([response for _, response in rows]) if rows else torch.zeros(0, dtype=torch.int64),
        rows=tuple(i for i, _ in rows),
        counts=torch.tensor([len(response) for _, response in rows], dtype=torch.int64),
        routes=_padded_routes(torch.cat(routes), multiple_of) if routes else None,
    )


def _padded_routes(routes: Tensor, multiple_of: int) -> Tensor:
    """Pad routes [tokens, layers, k] with the first k experts, because a token needs k different experts."""
    _, layers, k = routes.shape
    padding = torch.arange(k, dtype=routes.dtype).expand(-len(routes) % multiple_of, layers, k)
    return torch.cat((routes, padding))


def _runs(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((len(list(same)), length) for length, same in groupby(lengths) if length)


def _concatenated_ranges(lengths: Tensor) -> Tensor:
    """Return [0, ..., n - 1] for each length n, concatenated."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) - (ends - lengths).repeat_interleave(lengths)


def own_tokens(groups: tuple[PackedGroup, ...], rank: int, size: int) -> Tensor:
    """Return the stream indices [T/size] int64 of a rank's tokens in context parallelism, in stream order.

    Each segment is split into 2C chunks for C ranks, and rank r gets chunks r and 2C - 1 - r, so that all ranks do the
    same work under a causal mask (Llama 3, Dubey et al. 2024, section 3.3.2). Transformer Engine's variable-length
    attention expects this order. The length of every segment must be a multiple of 2C. size: C.
    """
    pieces = []
    begin = 0
    for length in segment_lengths(groups):
        chunk_len = length // (2 * size)
        for i in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(begin + i * chunk_len, begin + (i + 1) * chunk_len))
        begin += length
    return torch.cat(pieces)


def split_for_rank(batch: Packed, rank: int, size: int) -> Packed:
    """Return a rank's part of a plain micro-batch: its own_tokens, and the response tokens that they predict.

    The fields groups, rows and counts still describe the whole stream.
    """
    own_indices = own_tokens(batch.groups, rank, size)
    new_index = torch.full((len(batch.input_ids),), -1)
    new_index[own_indices] = torch.arange(len(own_indices))
    predict = new_index[batch.predict]
    kept = (predict >= 0).nonzero().squeeze(1)
    return replace(
        batch,
        input_ids=batch.input_ids[own_indices],
        position_ids=batch.position_ids[own_indices],
        predict=predict[kept],
        targets=batch.targets[kept],
        kept=kept,
        routes=None if batch.routes is None else batch.routes[own_indices],
    )


def segment_lengths(groups: tuple[PackedGroup, ...]) -> list[int]:
    """Return the tokens of each segment of a plain stream, in stream order."""
    return [length for group in groups for count, length in group.segments for _ in range(count)]
