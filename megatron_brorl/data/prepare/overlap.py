"""Texts that say the same: duplicates in a set, and problems of an evaluation that a training set contains."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass

_WORD = re.compile(r"\w+")


def normalized(text: str) -> str:
    """The text in Unicode's NFKC, without case, every run of white space one space. Signs stay: 2+3 is not 2-3."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def words(text: str) -> list[str]:
    """Letters and digits between anything else, normalized."""
    return _WORD.findall(normalized(text))


class Duplicates:
    """Which texts have come before; 16 bytes of each are kept."""

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}  # text -> its first answer

    def reason(self, text: str, answer: str | None) -> str:
        """Why a row that has come before is not taken again; "" for a new one."""
        key, said = _digest(normalized(text)), _digest(normalized(answer or ""))
        first = self._seen.setdefault(key, said)
        if first is said:  # that very object: nothing was there before
            return ""
        return "duplicate" if first == said else "duplicate with another answer"


@dataclass(frozen=True)
class Hit:
    """A text that an evaluation has too."""

    where: str  # of the evaluation's row
    words: str  # what both have


class Contamination:
    """The n-grams of words of evaluation problems, and the problems that are shorter than one as a whole.

    As for GPT-3 (Brown et al. 2020, appendix C), where n is 13 for most sets.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._grams: dict[str, str] = {}  # n-gram -> the first evaluation row that has it
        self._short: dict[str, str] = {}  # normalized text -> likewise

    def add(self, text: str, where: str) -> None:
        """An evaluation problem."""
        found = words(text)
        if len(found) < self._n:
            self._short.setdefault(normalized(text), where)
        for gram in self._grams_of(found):
            self._grams.setdefault(gram, where)

    def find(self, text: str) -> Hit | None:
        """The first n-gram that the text shares with an evaluation, or the short problem that it is."""
        for gram in self._grams_of(words(text)):
            if gram in self._grams:
                return Hit(self._grams[gram], gram)
        whole = normalized(text)
        return Hit(self._short[whole], whole) if whole in self._short else None

    def _grams_of(self, found: list[str]) -> list[str]:
        return [" ".join(found[i : i + self._n]) for i in range(len(found) - self._n + 1)]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
