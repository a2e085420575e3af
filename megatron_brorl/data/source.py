"""Where a run's prompts come from: a stream without end, whose prompt at a place is a pure function of seed and place.

So resuming needs the place and nothing else, and ranks agree without talking.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_brorl.config.rules import named
from megatron_brorl.config.schema import DataConfig, RewardConfig
from megatron_brorl.data.chat import spoken
from megatron_brorl.data.generate import GeneratedPrompts
from megatron_brorl.data.hub import data_file
from megatron_brorl.data.mixture import places, whole_weights
from megatron_brorl.data.prompts import Row, Verifiers, read_rows, tokenize
from megatron_brorl.data.round_trip import GENERATED, Written, check_round_trip, sampled
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.registry import entry
from megatron_brorl.types import Prompt


class PromptSource(Protocol):
    def take(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts of the stream, from place `start` on."""


class GeneratedSource:
    """A generated stream."""

    def __init__(self, prompts: GeneratedPrompts) -> None:
        self._prompts = prompts

    def take(self, start: int, count: int) -> list[Prompt]:
        return [self._prompts.prompt(place) for place in range(start, start + count)]


class FileSource:
    """The rows of files, over and over, each epoch in an order of its own; a step may span epochs, and repeat rows."""

    def __init__(self, prompts: Sequence[Prompt], seed: int | str) -> None:
        self._prompts = prompts
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_shuffled, len(prompts), seed))

    def take(self, start: int, count: int) -> list[Prompt]:
        return [self.at(position) for position in range(start, start + count)]

    def at(self, position: int) -> Prompt:
        """Number `position` of the endless stream."""
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[place]]


class MixtureSource:
    """Several files' rows, each source with its share of every step and in epochs of its own."""

    def __init__(self, sources: Mapping[str, Sequence[Prompt]], weights: Sequence[float], seed: int) -> None:
        """sources: by name, which decides the order of their rows. weights: in the order of the sources."""
        self._sources = [FileSource(prompts, f"{seed}:{name}") for name, prompts in sources.items()]
        self._weights = whole_weights(weights)

    def take(self, start: int, count: int) -> list[Prompt]:
        return [self._sources[source].at(position) for source, position in places(self._weights, start, count)]


@dataclass(frozen=True)
class Sources:
    train: PromptSource
    held_out: list[Prompt]
    verifiers: frozenset[str]  # that any of them names
    report: str  # what was read or generated, one line each; every skipped row is listed, and what the tokenizer loses
    rows: Sequence[Prompt] = ()  # of files: all that `train` is made of, in the files' order
    files: tuple[tuple[str, str, int], ...] = ()  # that were read: key of the configuration, name, rows

    def first(self) -> Sequence[Prompt]:
        """All rows of files; generated prompts have no end, and their first ones tell one generator from another."""
        return self.rows or self.train.take(0, 16)


def load_sources(
    config: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    seed: int,
    reward: RewardConfig = RewardConfig(),  # noqa: B008  (frozen)
) -> Sources:
    """Training and held-out prompts of a run. `seed` is the run's; the held-out prompts do not depend on it.

    Generated held-out prompts never occur in the training stream. Raises UserError for whatever is wrong with the data.
    """
    # Generated, or from files.
    if config.tasks:
        return _generated(config, tokenizer, max_prompt_tokens, seed)
    if not (config.train or config.mixture):
        raise UserError(
            "data: nothing to train on; give data.train (JSONL or Parquet files), data.mixture or data.tasks"
        )
    reader = _Reader(config, _verifiers(config, reward), tokenizer, max_prompt_tokens)

    # One stream of rows, or several with their shares.
    source: PromptSource
    if config.mixture:
        mixed = reader.mixture()
        source = MixtureSource(mixed, [part.weight for part in config.mixture], seed)
        key, train = "data.mixture", [prompt for prompts in mixed.values() for prompt in prompts]
    else:
        key, train = "data.train", reader.read(config.train, "data.train")
        source = FileSource(train, seed)

    # What is held out, and what of it is trained on.
    held_out = reader.read(config.held_out, "data.held_out")
    texts = {prompt.text for prompt in train}
    leaked = sum(prompt.text in texts for prompt in held_out)
    if leaked:
        reader.report.append(f"data.held_out: {leaked} of {len(held_out)} prompts also occur in {key}")
    names = frozenset(prompt.verifier for prompt in (*train, *held_out))
    return Sources(source, held_out, names, "\n".join(reader.report), train, tuple(reader.files))


def load_benchmarks(
    benchmarks: Sequence[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    reward: RewardConfig = RewardConfig(),  # noqa: B008  (frozen)
) -> tuple[dict[str, list[Prompt]], str]:
    """The prompts of evaluate.benchmarks by their names, which differ, and a report as that of Sources.

    Raises UserError for whatever is wrong.
    """
    found: dict[str, list[Prompt]] = {}
    reader = _Reader(config, _verifiers(config, reward), tokenizer, max_prompt_tokens)
    for name, file in map(named, benchmarks):
        found[name] = reader.read([file], f"evaluate.benchmarks ({name})")
    return found, "\n".join(reader.report)


def _generated(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, seed: int) -> Sources:
    held_out_stream = GeneratedPrompts(
        config, _stream_seed("held_out", config.held_out_seed), tokenizer, max_prompt_tokens
    )
    held_out = held_out_stream.held_out(config.held_out_prompts)
    train_stream = GeneratedPrompts(
        config,
        _stream_seed("train", config.train_seed, seed),
        tokenizer,
        max_prompt_tokens,
        exclude=frozenset(prompt.text for prompt in held_out),
    )
    train_stream.prompt(0)  # a pattern or limit that cannot work is an error now, not at the first step
    names = ", ".join(task.name for task in config.tasks)
    report = [f"data.tasks: endless prompts of {names}; {len(held_out)} different ones held out"]
    report += check_round_trip(train_stream.written(GENERATED), tokenizer, "data.tasks")
    return Sources(GeneratedSource(train_stream), held_out, frozenset([train_stream.verifier]), "\n".join(report))


def _verifiers(config: DataConfig, reward: RewardConfig) -> Verifiers:
    """Return how rows are judged; raise UserError for an unknown default before any row is read."""
    entry(config.verifier, "data.verifier", reward)
    return Verifiers(config.verifier, reward)


@dataclass
class _Reader:
    """Files to prompts, with a line for each of them."""

    config: DataConfig
    verifiers: Verifiers
    tokenizer: Tokenizer
    max_prompt_tokens: int
    report: list[str] = field(default_factory=list)
    files: list[tuple[str, str, int]] = field(default_factory=list)  # see Sources

    def read(self, files: Sequence[str], key: str, verifier: str = "") -> list[Prompt]:
        """The prompts of files. verifier: of rows that name none; "" = data.verifier."""
        # The rows as they are; ids are those of random streams.
        verifiers = dataclasses.replace(self.verifiers, default=verifier or self.verifiers.default)
        rows: list[Row] = []
        for name in files:
            path = data_file(name)
            read = read_rows(path, verifiers, self.config.columns)
            if not read:
                raise UserError(f"{path}: the file has no rows ({key}); remove it from the list or fill it")
            rows += read
            self.files.append((key, name, len(read)))
            self.report.append(f"{key}: {len(read)} prompts from {name}")

        # Two rows of one id would draw the same random numbers.
        again = [row_id for row_id, times in Counter(row.id for row in rows).items() if times > 1]
        if again:
            first, second = [row.where for row in rows if row.id == again[0]][:2]
            raise UserError(f"{second}: id {again[0]!r} is taken by {first}; give every row of {key} its own id")

        # As the model sees them, and what of them it cannot see.
        prompts = tokenize(rows, self.tokenizer, self.config, self.max_prompt_tokens)
        looked_at = [
            Written(rows[i].where, spoken(rows[i].prompt), rows[i].answer, rows[i].target) for i in sampled(len(rows))
        ]
        self.report += check_round_trip(looked_at, self.tokenizer, key)
        return prompts

    def mixture(self) -> dict[str, list[Prompt]]:
        """The prompts of each source of data.mixture by its name. Raises UserError naming the source."""
        found: dict[str, list[Prompt]] = {}
        ids: dict[str, str] = {}  # of every prompt so far: the source that has it
        total = sum(part.weight for part in self.config.mixture)
        for i, part in enumerate(self.config.mixture):
            key = f"data.mixture[{i}]"

            # What must be there, and may be there once.
            if not part.files:
                raise UserError(f"{key}.files is empty; name JSONL or Parquet files")
            if part.verifier:
                entry(part.verifier, f"{key}.verifier", self.verifiers.reward)
            name = part.name or Path(part.files[0]).stem
            if name in found:
                raise UserError(f"{key}: there is another source called {name!r}; give each a name of its own")

            # Random streams are named by ids, so that two sources may not have one in common.
            found[name] = self.read(part.files, key, part.verifier)
            for prompt in found[name]:
                if ids.setdefault(prompt.id, name) != name:
                    raise UserError(
                        f"{key}: id {prompt.id!r} is taken by a row of {ids[prompt.id]!r}; give every row its own id"
                    )
            self.report.append(f"{key}: {name} has {part.weight / total:.1%} of the prompts")
        return found


def _shuffled(size: int, seed: int | str, epoch: int) -> list[int]:
    """An order of range(size) that no version of any library can change."""
    return sorted(range(size), key=lambda i: hashlib.blake2b(f"{seed}:{epoch}:{i}".encode(), digest_size=8).digest())


def _stream_seed(*key: int | str) -> int:
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
