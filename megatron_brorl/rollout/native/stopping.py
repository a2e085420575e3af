"""When a response ends before its limit: stop tokens, and strings that its text comes to contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TAIL = 8  # tokens looked at beyond as many as a stop string has characters: a token may add none


class Stops:
    """Looks at each row's newest token."""

    def __init__(
        self, ids: Sequence[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str] | None
    ) -> None:
        """decode: tokens -> text, needed with strings alone; ValueError where it is missing or a string is empty."""
        if strings and decode is None:
            raise ValueError("stop strings need an engine that was given a tokenizer's decode")
        if not all(strings):
            raise ValueError("a stop string is empty")
        self.ids, self.strings, self.decode = torch.tensor(list(ids), dtype=torch.int64), tuple(strings), decode
        self.tail = max(map(len, strings), default=0) + TAIL
        self.may_end: dict[int, bool] = {}  # by token

    def hit(self, new: Tensor, rows: Tensor, tokens: Tensor, produced: Tensor) -> Tensor:
        """new [B] int64, of rows [B] in tokens [rows, max_tokens], of which produced [rows] are there -> [B] bool."""
        ended = torch.isin(new, self.ids)
        if self.strings:
            for i, (token, row) in enumerate(zip(new.tolist(), rows.tolist(), strict=True)):
                if self._may_end(token):
                    end = int(produced[row])
                    ended[i] |= self._contains(tokens[row, max(0, end - self.tail) : end].tolist())
        return ended

    def _contains(self, ids: list[int]) -> bool:
        assert self.decode is not None
        text = self.decode(ids)
        return any(s in text for s in self.strings)

    def _may_end(self, token: int) -> bool:
        """Whether the token can complete a stop string; part of a character may be anything."""
        if token not in self.may_end:
            assert self.decode is not None
            text = self.decode([token])
            self.may_end[token] = "�" in text or any(c in text for c in {s[-1] for s in self.strings})
        return self.may_end[token]
