"""The built-in rollout engine: any device, the prompt computed once, finished rows compacted away, keyed sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.hf_config import ModelShape
from megatron_brorl.rollout.decoder import Decoder
from megatron_brorl.rollout.engine import Request, SampleTokens, Sampling, Watch
from megatron_brorl.types import Rollout, RolloutGroup

COMPACT_BELOW = 0.75  # compact when fewer than this share of the rows is alive
FIRST_SLOTS = 32  # suffix cache slots to begin with; doubled as responses grow


class TorchEngine:
    """A full copy of the model on one device; see rollout.engine for the verbs."""

    def __init__(
        self,
        shape: ModelShape,
        names: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        sample: SampleTokens,
    ) -> None:
        """names: every Hugging Face tensor the model has, with its shape. max_rows: rows decoded at a time.

        sample: which implementation draws the tokens (config key ops.implementation).
        """
        self.shape, self.names, self.device, self.dtype, self.max_rows = shape, names, device, dtype, max_rows
        self.sample = sample
        self.version = -1
        self._decoder: Decoder | None = None

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine. Nothing is taken over before the whole stream was seen and found complete."""
        received: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in self.names or name in received:
                raise ValueError(f"weight update: {name} is {'sent twice' if name in received else 'unknown'}")
            if tuple(tensor.shape) != self.names[name]:
                raise ValueError(f"weight update: {name} has shape {list(tensor.shape)}, not {self.names[name]}")
            received[name] = tensor.detach().to(self.device, self.dtype, copy=True)
        missing = self.names.keys() - received.keys()
        if missing:
            raise ValueError(f"weight update: {len(missing)} tensors missing, for example {min(missing)}")
        self._decoder = Decoder(self.shape, received, self.dtype)
        self.version = version

    def sleep(self) -> None:
        self._decoder = None
        self.version = -1

    def wake(self) -> None:
        """Nothing to prepare: memory is taken by update_weights and generate."""

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[RolloutGroup]:
        if self._decoder is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        if longest + sampling.max_tokens > self.shape.context:
            raise UserError(
                f"rollout.max_tokens = {sampling.max_tokens} after a prompt of {longest} tokens exceeds the model's "
                f"context of {self.shape.context}: lower rollout.max_tokens or shorten the prompts"
            )
        collected: list[list[Rollout]] = [[] for _ in requests]
        for wave in _waves(requests, self.max_rows):
            parts = [Request(requests[i].prompt, requests[i].key, n, first) for i, first, n in wave]
            for (i, _, _), rollouts in zip(wave, self._decode(parts, sampling), strict=True):
                collected[i].extend(rollouts)
        return [
            RolloutGroup(r.prompt, tuple(rollouts), self.version)
            for r, rollouts in zip(requests, collected, strict=True)
        ]

    def _decode(self, requests: list[Request], sampling: Sampling) -> list[list[Rollout]]:
        decoder = self._decoder
        assert decoder is not None
        ids = [torch.tensor(r.prompt.token_ids, device=self.device) for r in requests]
        lengths = torch.tensor([len(x) for x in ids], device=self.device)
        cache = decoder.prefill(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths)
        counts = [r.n for r in requests]
        rows = decoder.start(cache, counts, lengths, min(FIRST_SLOTS, sampling.max_tokens))

        total = sum(counts)
        key = torch.tensor([r.key for r in requests], device=self.device)[rows.prompt]
        first = torch.tensor([r.first for r in requests], device=self.device)[rows.prompt]
        sibling = first + rows.place
        stops = torch.tensor(sampling.stop_ids, device=self.device)
        tokens = torch.zeros(total, sampling.max_tokens, dtype=torch.int64, device=self.device)
        log_probs = torch.zeros(total, sampling.max_tokens, device=self.device)
        ends = torch.full((total,), sampling.max_tokens, device=self.device)
        stopped = torch.zeros(total, dtype=torch.bool, device=self.device)

        origin = torch.arange(total, device=self.device)  # which output row each row in flight writes
        alive = torch.ones(total, dtype=torch.bool, device=self.device)
        hidden = cache.hidden[rows.prompt]
        for position in range(sampling.max_tokens):
            place = torch.full_like(origin, position)
            logits, settings = decoder.logits(hidden), (sampling.temperature, sampling.top_p, sampling.top_k)
            new, log_prob = self.sample(logits, key[origin], sibling[origin], place, *settings)
            live = origin[alive]
            tokens[live, position], log_probs[live, position] = new[alive], log_prob[alive]
            ended = torch.isin(new, stops) & alive
            ends[origin[ended]], stopped[origin[ended]] = position + 1, True
            alive &= ~ended
            remaining, lowest = torch.stack((alive.sum(), new.min())).tolist()
            if lowest < 0:  # how the sampler on CUDA says that a row has no distribution
                raise ValueError("generate: the logits of a row have NaN, +inf or nothing above -inf")
            if not remaining or position + 1 == sampling.max_tokens:
                break
            if remaining < COMPACT_BELOW * len(alive):
                kept = alive.nonzero().squeeze(-1)
                rows, origin, new = rows.keep(kept), origin[kept], new[kept]
                alive = torch.ones_like(kept, dtype=torch.bool)
            if position >= rows.keys[0].shape[2]:
                rows.grow(min(2 * position, sampling.max_tokens))
            hidden = decoder.step(cache, rows, new, position)
        return _collect(requests, tokens.cpu(), log_probs.cpu(), ends.tolist(), stopped.tolist())


def _waves(requests: Sequence[Request], max_rows: int) -> list[list[tuple[int, int, int]]]:
    """Cut the requests into waves of at most max_rows rows: lists of (request, first sibling, siblings)."""
    waves: list[list[tuple[int, int, int]]] = []
    room = 0
    for i, request in enumerate(requests):
        done = 0
        while done < request.n:
            if not room:
                waves.append([])
                room = max_rows
            take = min(room, request.n - done)
            waves[-1].append((i, request.first + done, take))
            done += take
            room -= take
    return waves


def _collect(
    requests: list[Request], tokens: Tensor, log_probs: Tensor, ends: list[int], stopped: list[bool]
) -> list[list[Rollout]]:
    groups, row = [], 0
    for request in requests:
        group = []
        for index in range(request.first, request.first + request.n):
            end = ends[row]
            # Clones, so that a short response does not keep the whole buffer alive.
            ids, lps = tokens[row, :end].clone(), log_probs[row, :end].clone()
            group.append(Rollout(index, ids, lps, "stop" if stopped[row] else "length"))
            row += 1
        groups.append(group)
    return groups
