"""Where each token of a response ends in its text, so that whoever colours tokens needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_LOOKED_AT = 4096  # ids among which one letter is looked for


class TokenEnds:
    """Remembers how many characters a token adds, which is asked once per token of the vocabulary."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._added: dict[int, int] = {}
        self._letter: int | None = None  # a token of one letter, in front of the one that is asked for

    def of(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Characters of the text up to the end of each token [G]; None where tokens and characters do not agree.

        ids: without the token that ended the response. text: what they decode to. Tokens that hold parts of a character
        may not agree with it.
        """
        if not ids:
            return []
        # Many tokenizers drop the space in front of the first word alone.
        ends = [len(self._decode([ids[0]]))]
        for i in ids[1:]:
            if i not in self._added:
                self._added[i] = self._ask(i)
            ends.append(ends[-1] + self._added[i])
        return ends if ends[-1] == len(text) else None

    def _ask(self, token: int) -> int:
        if self._letter is None:
            texts = ((i, self._decode([i])) for i in range(_LOOKED_AT))
            self._letter = next((i for i, text in texts if len(text) == 1 and text.isascii() and text.isalpha()), token)
        return len(self._decode([self._letter, token])) - len(self._decode([self._letter]))
