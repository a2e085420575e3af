"""When a response ends before its limit: at a stop token, or when its text contains a stop string.

A response ends with the first token after which its decoded text contains a stop string. Decoding every prefix would
cost the square of the length, so most tokens decode only the end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REPLACEMENT = "\ufffd"  # decoders write it for invalid UTF-8, such as part of a character
_MAX_CHARACTER_BYTES = 4


class StopCriteria:
    """Stop tokens and stop strings, checked after every token."""

    def __init__(
        self, ids: Sequence[int], strings: Sequence[str], decode: Callable[[Sequence[int]], str] | None
    ) -> None:
        """decode: tokens -> text, needed for strings. Raises ValueError if it is missing or a string is empty."""
        if strings and decode is None:
            raise ValueError("stop strings need an engine that was given a tokenizer's decode")
        if not all(strings):
            raise ValueError("a stop string is empty")
        self.ids = torch.tensor(list(ids), dtype=torch.int64)
        self.strings = tuple(strings)
        self.decode = decode
        self.last_characters = {s[-1] for s in strings}

        # A token that adds text adds at least one byte, so a string spans at most as many tokens as it has bytes. The
        # first token of a window may decode to other text than in the response (a dropped space, part of a character).
        self.window = max((len(s.encode("utf-8", "surrogatepass")) for s in strings), default=0) + _MAX_CHARACTER_BYTES
        self.texts: dict[int, str] = {}  # of single tokens
        self._extended: dict[tuple[str, ...], StopCriteria] = {}

    def with_strings(self, strings: tuple[str, ...]) -> StopCriteria:
        """Return the criteria with further stop strings."""
        if not strings:
            return self
        if strings not in self._extended:
            ids = self.ids.tolist()
            self._extended[strings] = StopCriteria(ids, (*self.strings, *strings), self.decode)
        return self._extended[strings]

    def hit(self, new: Tensor, rows: Tensor, tokens: Tensor, produced: Tensor, start: Tensor) -> Tensor:
        """Return whether each row ends with its newest token, [B] bool.

        new [B] int64: the newest token of each row; rows [B]: its slot in tokens [slots, max_tokens]; produced [slots]:
        number of valid tokens; start [slots]: number of tokens before the text in which strings are searched.
        """
        ended = torch.isin(new, self.ids)
        if self.strings:
            for i, (token, row) in enumerate(zip(new.tolist(), rows.tolist(), strict=True)):
                if not ended[i] and self._may_complete(token):
                    ended[i] = self._contains(tokens[row, int(start[row]) : int(produced[row])])
        return ended

    def first_end(self, ids: Tensor, begun: int = 0) -> int | None:
        """Return the number of tokens of ids [G] after which the response ends, or None if it does not end.

        begun: number of first tokens that are known not to end it.
        """
        for end in range(begun + 1, len(ids) + 1):
            token = int(ids[end - 1])
            if bool((self.ids == token).any()) or (self._may_complete(token) and self._contains(ids[:end])):
                return end
        return None

    def _may_complete(self, token: int) -> bool:
        """Return whether a stop string can end inside the text that the token adds.

        A token by itself decodes to that text, with two exceptions: bytes that complete a character, and a space that
        the decoder drops at the start of a text or adds between two words.
        """
        text = self._text(token)
        return _REPLACEMENT in text or " " in self.last_characters or any(c in text for c in self.last_characters)

    def _contains(self, ids: Tensor) -> bool:
        """Return whether the text of ids [G] contains a stop string that the last token completes."""
        start = self._window_start(ids)

        # A window that starts within a character, or within a run of byte tokens that some decoders accept only as a
        # whole, decodes to replacement characters. Then one of the next positions to the left starts a character.
        for first in range(start, max(start - _MAX_CHARACTER_BYTES, -1), -1):
            text = self._decode(ids[first:])
            if self._in(text):
                return first == 0 or self._in(self._decode(ids))
            if _REPLACEMENT not in text:
                break
        return False

    def _window_start(self, ids: Tensor) -> int:
        """Return the start of the last `window` tokens that add text; other tokens, such as padding, do not count."""
        start = len(ids)
        missing = self.window
        while missing > 0 and start > 0:
            end, start = start, max(0, start - missing)
            missing -= sum(bool(self._text(token)) for token in ids[start:end].tolist())
        return start

    def _in(self, text: str) -> bool:
        return any(s in text for s in self.strings)

    def _decode(self, ids: Tensor) -> str:
        assert self.decode is not None
        return self.decode(ids.tolist())

    def _text(self, token: int) -> str:
        if token not in self.texts:
            assert self.decode is not None
            self.texts[token] = self.decode([token])
        return self.texts[token]
