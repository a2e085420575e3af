"""The prompts of a run: an endless stream in which a prompt depends only on the seed and its index.

A run can be resumed at any index, and ranks agree without communication.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from megatron_brorl.config.rules import parse_benchmark
from megatron_brorl.config.schema import DataConfig, RewardConfig
from megatron_brorl.data.generate import VERIFIER, GeneratedPrompts, hash_int
from megatron_brorl.data.hub import data_file
from megatron_brorl.data.prompts import Row, RowFormat, check_round_trip, read_rows, tokenize
from megatron_brorl.data.tokenizers import Tokenizer, transformers_stop_ids
from megatron_brorl.errors import UserError
from megatron_brorl.files import sha256
from megatron_brorl.rewards.registry import entry
from megatron_brorl.types import Prompt

TEMPLATE_DATE = "template_date"
TRAIN_STREAM = 1  # number of a random stream of generated prompts
SFT_STREAM = 3  # `brorl sft` learns from other generated prompts than those of `brorl train`
# Files that determine how text is tokenized.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
_MAX_CHECKED = 512  # rows of a file, evenly spaced, that are encoded and decoded as a check


class PromptSource(Protocol):
    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Return `count` prompts of the stream from index `start` on."""


class FileSource:
    """The rows of files again and again, in another order in each epoch. A step may span epochs."""

    def __init__(self, prompts: Sequence[Prompt], seed: int | str) -> None:
        self._prompts = prompts
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_shuffled, len(prompts), seed))  # by epoch

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [self.at(position) for position in range(start, start + count)]

    def at(self, position: int) -> Prompt:
        """Return one prompt of the endless stream."""
        epoch, index = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[index]]


class MixtureSource:
    """Several sources, each with its share of every step and with its own epochs.

    Sources alternate as seats do in the method of Sainte-Lague (Webster): the next prompt comes from the source with
    the largest weight / (2 prompts so far + 1). Among k sources with shares w, source i has p w_i of the first p
    prompts within (1 + k w_i) / 2, and exactly p w_i at every multiple of the sum of the weights as whole numbers.
    """

    def __init__(self, sources: Mapping[str, Sequence[Prompt]], weights: Sequence[float], seed: int) -> None:
        self._sources = [FileSource(prompts, f"{seed}:{name}") for name, prompts in sources.items()]
        self._weights = whole_weights(weights)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [self._sources[source].at(i) for source, i in mixture_positions(self._weights, start, count)]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same proportion as the weights.

    Each weight is taken as its shortest decimal form, so that 0.4 is exactly 2/5.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    return [weight // math.gcd(*integers) for weight in integers]


def mixture_positions(weights: Sequence[int], start: int, count: int) -> list[tuple[int, int]]:
    """Return (source, position in the stream of that source) for `count` prompts of a mixture from `start` on."""

    def next_position() -> tuple[int, int]:
        source = min(range(len(weights)), key=lambda i: Fraction(2 * used[i] + 1, weights[i]))
        used[source] += 1
        return source, used[source] - 1

    # By the bound of MixtureSource, source i has had start w_i - (1 + k w_i) / 2 prompts or more, with w_i = w / total.
    total = sum(weights)
    used = [max(0, -(-(2 * start * w - total - len(weights) * w) // (2 * total))) for w in weights]
    for _ in range(start - sum(used)):
        next_position()
    return [next_position() for _ in range(count)]


@dataclass(frozen=True)
class Sources:
    train: PromptSource
    held_out: list[Prompt]
    verifiers: frozenset[str]  # the verifiers of all rows
    report: str  # lines about the data and about text that the tokenizer loses
    rows: Sequence[Prompt] = ()  # all rows of the training files, in their order
    files: tuple[tuple[str, str, int], ...] = ()  # configuration key, name and row count of the files read

    def representative_prompts(self) -> Sequence[Prompt]:
        """Return all rows of files, or the first generated prompts, which identify the generator."""
        return self.rows or self.train.prompts(start=0, count=16)

    def digests(self, tokenizer: Path, date: datetime.date | None) -> dict[str, str]:
        """Return the SHA-256 of tokenizer files and rows by name, and the date that the chat template writes, if any.

        A run that is resumed with other digests is another run. The date comes first, because it changes the rows.
        """
        return {
            **({} if date is None else {TEMPLATE_DATE: str(date)}),
            "tokenizer": tokenizer_digest(tokenizer),
            "train": prompts_digest(self.representative_prompts()),
            "held_out": prompts_digest(self.held_out),
        }


def tokenizer_digest(directory: Path) -> str:
    """Return the SHA-256 of a directory's tokenizer files, by name and content, and of the ids that end a response."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = directory / name
        if path.is_file():
            digest.update(f"{name}:{sha256(path)};".encode())
    digest.update(f"stop:{sorted(transformers_stop_ids(directory))}".encode())
    return digest.hexdigest()


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of prompts in their order: ids, tokens, answers, verifiers, metadata and columns."""
    digest = hashlib.sha256()
    for prompt in prompts:
        metadata = json.dumps(prompt.metadata, sort_keys=True, default=str)
        row = (prompt.id, prompt.token_ids, prompt.answer, prompt.verifier, metadata, sorted(prompt.columns.items()))
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def load_sources(
    config: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    seed: int,
    reward: RewardConfig = RewardConfig(),  # noqa: B008  (frozen)
    stream: int = TRAIN_STREAM,
) -> Sources:
    """Return the training and held-out prompts of a run. Held-out prompts do not depend on the seed.

    stream: number of the random stream of generated training prompts, TRAIN_STREAM or SFT_STREAM.
    Generated held-out prompts never occur in the training stream. Raises UserError for invalid data.
    """
    if config.tasks:
        return _generated(config, tokenizer, max_prompt_tokens, seed, stream)
    if not (config.train or config.mixture):
        raise UserError("data: nothing to train on; set data.train (files), data.mixture or data.tasks")
    reader = _Reader(config, reward, tokenizer, max_prompt_tokens)
    source: PromptSource
    if config.mixture:
        mixed = reader.mixture()
        source = MixtureSource(mixed, [part.weight for part in config.mixture], seed)
        key = "data.mixture"
        train = [prompt for prompts in mixed.values() for prompt in prompts]
    else:
        key = "data.train"
        train = reader.read(config.train, key)
        source = FileSource(train, seed)

    held_out = reader.read(config.held_out, "data.held_out")
    texts = {prompt.text for prompt in train}
    if leaked := sum(prompt.text in texts for prompt in held_out):
        reader.report.append(f"data.held_out: {leaked} of {len(held_out)} prompts also occur in {key}")
    verifiers = frozenset(prompt.verifier for prompt in (*train, *held_out))
    return Sources(source, held_out, verifiers, "\n".join(reader.report), train, tuple(reader.files))


def load_benchmarks(
    benchmarks: Sequence[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    reward: RewardConfig = RewardConfig(),  # noqa: B008  (frozen)
) -> tuple[dict[str, list[Prompt]], str]:
    """Return the prompts of evaluate.benchmarks by their names, and a report. Raises UserError for invalid data."""
    reader = _Reader(config, reward, tokenizer, max_prompt_tokens)
    named = map(parse_benchmark, benchmarks)
    prompts = {name: reader.read([file], f"evaluate.benchmarks ({name})") for name, file in named}
    return prompts, "\n".join(reader.report)


def _generated(config: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, seed: int, stream: int) -> Sources:
    held_out_seed = hash_int("held_out", 2, size=4)  # 2 is the stream of held-out prompts
    train_seed = hash_int("train", stream, seed, size=4)
    held_out = GeneratedPrompts(config, held_out_seed, tokenizer, max_prompt_tokens).held_out(config.held_out_prompts)
    verifier = "none" if config.verifier == "none" else VERIFIER
    train = GeneratedPrompts(config, train_seed, tokenizer, max_prompt_tokens, held_out.keys(), verifier)
    train.prompts(start=0, count=1)  # Report an invalid pattern or limit now and not at the first step.
    names = ", ".join(task.name for task in config.tasks)
    report = [f"data.tasks: endless prompts of {names}; {len(held_out)} different ones held out"]
    report += check_round_trip(train.examples(), tokenizer, "data.tasks")
    return Sources(train, list(held_out.values()), frozenset([VERIFIER, verifier]), "\n".join(report))


@dataclass
class _Reader:
    """Reads files into prompts and adds one line per file to the report."""

    config: DataConfig
    reward: RewardConfig
    tokenizer: Tokenizer
    max_prompt_tokens: int
    report: list[str] = field(default_factory=list)
    files: list[tuple[str, str, int]] = field(default_factory=list)  # see Sources

    def read(self, files: Sequence[str], key: str, verifier: str = "") -> list[Prompt]:
        """Return the prompts of files. verifier: used for rows that name none; data.verifier by default."""
        entry(self.config.verifier, "data.verifier", self.reward)
        row_format = RowFormat(verifier or self.config.verifier, self.reward, self.config.columns)
        rows: list[Row] = []
        for name in files:
            path = data_file(name)
            file_rows = read_rows(path, row_format)
            if not file_rows:
                raise UserError(f"{path}: the file has no rows ({key}); remove it from the list or fill it")
            rows += file_rows
            self.files.append((key, name, len(file_rows)))
            self.report.append(f"{key}: {len(file_rows)} prompts from {name}")

        # Two rows with one id would draw the same random numbers.
        repeated = [row_id for row_id, times in Counter(row.id for row in rows).items() if times > 1]
        if repeated:
            first, second = [row.where for row in rows if row.id == repeated[0]][:2]
            raise UserError(f"{second}: id {repeated[0]!r} is taken by {first}; give every row of {key} its own id")

        unscored = next((row.where for row in rows if row.verifier == "none"), "")
        if unscored and not key.startswith(("data.train", "data.mixture")):
            raise UserError(
                f'{unscored}: verifier "none" cannot evaluate: name one in the rows of {key}, or in data.verifier and '
                'set verifier = "none" only in [[data.mixture]] for the training files'
            )

        prompts = tokenize(rows, self.tokenizer, self.config, self.max_prompt_tokens)
        count = min(len(rows), _MAX_CHECKED)
        checked = [rows[i * len(rows) // count] for i in range(count)]
        texts = [(row.where, row.texts()) for row in checked]
        self.report += check_round_trip(texts, self.tokenizer, key)
        return prompts

    def mixture(self) -> dict[str, list[Prompt]]:
        """Return the prompts of each source of data.mixture by its name."""
        prompts: dict[str, list[Prompt]] = {}
        source_of: dict[str, str] = {}  # by the id of a prompt
        total = sum(source.weight for source in self.config.mixture)
        for i, source in enumerate(self.config.mixture):
            key = f"data.mixture[{i}]"
            if not source.files:
                raise UserError(f"{key}.files is empty; name data files")
            if source.verifier:
                entry(source.verifier, f"{key}.verifier", self.reward)
            name = source.name or Path(source.files[0]).stem
            if name in prompts:
                raise UserError(f"{key}: there is another source called {name!r}; give each its own name")

            prompts[name] = self.read(source.files, key, source.verifier)
            for prompt in prompts[name]:
                if source_of.setdefault(prompt.id, name) != name:
                    other = source_of[prompt.id]
                    raise UserError(f"{key}: id {prompt.id!r} is also in {other!r}; give every row its own id")
            self.report.append(f"{key}: {name} has {source.weight / total:.1%} of the prompts")
        return prompts


def _shuffled(size: int, seed: int | str, epoch: int) -> list[int]:
    """Return a permutation of range(size) that does not depend on the version of any library."""
    return sorted(range(size), key=lambda i: hashlib.blake2b(f"{seed}:{epoch}:{i}".encode(), digest_size=8).digest())
