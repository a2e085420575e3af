"""Where a run's prompts come from: what step s trains on is a pure function of the seed, s and the number of prompts.

So resuming needs the number of the step and nothing else, and ranks agree without talking.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_brorl.config.schema import DataConfig, RewardConfig
from megatron_brorl.data.generate import GeneratedPrompts
from megatron_brorl.data.prompts import Row, Verifiers, read_rows, tokenize
from megatron_brorl.data.round_trip import GENERATED, Written, check_round_trip, sampled
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.registry import check_combinations, entry
from megatron_brorl.types import Prompt


class PromptSource(Protocol):
    def take(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a step in which every step takes `count`."""


class GeneratedSource:
    """Prompt step * count + i of a generated stream."""

    def __init__(self, prompts: GeneratedPrompts) -> None:
        self._prompts = prompts

    def take(self, step: int, count: int) -> list[Prompt]:
        return [self._prompts.prompt(step * count + i) for i in range(count)]


class FileSource:
    """The rows of files, over and over, each epoch in an order of its own; a step may span epochs, and repeat rows."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_shuffled, len(prompts), seed))

    def take(self, step: int, count: int) -> list[Prompt]:
        taken = []
        for position in range(step * count, (step + 1) * count):
            epoch, place = divmod(position, len(self._prompts))
            taken.append(self._prompts[self._order(epoch)[place]])
        return taken


@dataclass(frozen=True)
class Sources:
    train: PromptSource
    held_out: list[Prompt]
    verifiers: frozenset[str]  # that any of them names
    report: str  # what was read or generated, one line each; every skipped row is listed, and what the tokenizer loses


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
    if config.tasks:
        return _generated(config, tokenizer, max_prompt_tokens, seed)
    if not config.train:
        raise UserError("data: nothing to train on; give data.train (JSONL or Parquet files) or data.tasks")
    verifiers = _verifiers(config, reward)

    # Both kinds of rows, and what they share.
    report: list[str] = []
    train = _from_files(config.train, "data.train", config, verifiers, tokenizer, max_prompt_tokens, report)
    held_out = _from_files(config.held_out, "data.held_out", config, verifiers, tokenizer, max_prompt_tokens, report)
    texts = {prompt.text for prompt in train}
    leaked = sum(prompt.text in texts for prompt in held_out)
    if leaked:
        report.append(f"data.held_out: {leaked} of {len(held_out)} prompts also occur in data.train")
    names = frozenset(prompt.verifier for prompt in (*train, *held_out))
    return Sources(FileSource(train, seed), held_out, names, "\n".join(report))


def load_benchmarks(
    files: Sequence[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    reward: RewardConfig = RewardConfig(),  # noqa: B008  (frozen)
) -> tuple[dict[str, list[Prompt]], str]:
    """The prompts of each file by the file's name without its ending, and a report as that of Sources.

    Raises UserError for whatever is wrong.
    """
    found: dict[str, list[Prompt]] = {}
    report: list[str] = []
    verifiers = _verifiers(config, reward)
    for name in files:
        stem = Path(name).stem
        if stem in found:
            raise UserError(f"evaluate.benchmarks: {name}: there is another file called {stem}; rename one of them")
        key = "evaluate.benchmarks"
        found[stem] = _from_files([name], key, config, verifiers, tokenizer, max_prompt_tokens, report)
    return found, "\n".join(report)


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
    """How rows are judged, told wrong before any of them is read."""
    check_combinations(reward.combination)
    entry(config.verifier, "data.verifier", reward)
    return Verifiers(config.verifier, reward)


def _from_files(
    files: Sequence[str],
    key: str,
    config: DataConfig,
    verifiers: Verifiers,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    report: list[str],
) -> list[Prompt]:
    rows: list[Row] = []
    for name in files:
        read, skipped = read_rows(Path(name), config.skip_bad_rows, verifiers)
        if not read:
            raise UserError(f"{name}: the file has no rows ({key}); remove it from the list or fill it")
        rows += read
        report.append(f"{key}: {len(read)} prompts from {name}" + (f", {len(skipped)} skipped" if skipped else ""))
        report += [f"  skipped {line}" for line in skipped]
    again = [row_id for row_id, times in Counter(row.id for row in rows).items() if times > 1]
    if again:
        first, second = [row.where for row in rows if row.id == again[0]][:2]
        raise UserError(f"{second}: id {again[0]!r} is taken by {first}; give every row of {key} its own id")
    prompts = tokenize(rows, tokenizer, config, max_prompt_tokens)
    looked_at = [Written(rows[i].where, rows[i].prompt, rows[i].answer) for i in sampled(len(rows))]
    report += check_round_trip(looked_at, tokenizer, key)
    return prompts


def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """An order of range(size) that no version of any library can change."""
    return sorted(range(size), key=lambda i: hashlib.blake2b(f"{seed}:{epoch}:{i}".encode(), digest_size=8).digest())


def _stream_seed(*key: int | str) -> int:
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
