"""Prompts of reasoning-gym tasks: an endless stream in which prompt i depends only on (tasks, seed, i).

No state is stored to resume it, every rank can generate every part of it, and Python's random state is not touched.
"""

from __future__ import annotations

import decimal
import hashlib
import itertools
import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.prompts import render
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifiers import gym
from megatron_brorl.types import Prompt

VERIFIER = "reasoning_gym"
_MAX_DRAWS = 1000  # for one prompt, until its question is not excluded
_CHECKED = 64  # prompts that are encoded and decoded as a check


@dataclass
class GeneratedPrompts:
    """A stream of the weighted tasks of a configuration, without the questions in `excluded`."""

    config: DataConfig
    seed: int
    tokenizer: Tokenizer
    max_prompt_tokens: int
    excluded: Container[str] = frozenset()
    verifier: str = VERIFIER

    def __post_init__(self) -> None:
        self._mixture = _Mixture(self.config.tasks, self.seed)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Return `count` prompts of the stream from index `start` on."""
        return [self._prompt(i, self._mixture.item(i, self.excluded)) for i in range(start, start + count)]

    def held_out(self, count: int) -> dict[str, Prompt]:
        """Return `count` prompts with different questions, by question."""
        return {item.question: self._prompt(i, item) for i, item in enumerate(self._mixture.distinct(count))}

    def examples(self) -> list[tuple[str, tuple[str, str]]]:
        """Return the first items of the stream: the origin, and the question and answer without a template."""
        items = [self._mixture.item(i) for i in range(_CHECKED)]
        return [(item.where, (item.question, item.entry["answer"])) for item in items]

    def _prompt(self, index: int, item: _Item) -> Prompt:
        text, ids = render(item.question, self.tokenizer, self.config, self.max_prompt_tokens, item.where)
        prompt_id = f"{item.task.name}:{self.seed}:{index}"
        return Prompt(prompt_id, text, ids, item.entry["answer"], self.verifier, item.metadata)


def generated_rows(tasks: Sequence[TaskConfig], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of a data file with different questions. Raises UserError if the tasks have fewer."""
    for line, item in enumerate(_Mixture(tasks, seed).distinct(count), start=1):
        yield {
            "id": f"{item.task.name}:{seed}:{line}",
            "prompt": item.question,
            "answer": item.entry["answer"],
            "verifier": VERIFIER,
            "metadata": item.metadata,
        }


def corpus(config: DataConfig, seed: int, count: int) -> Iterator[str]:
    """Yield texts to train a tokenizer on: `count` prompts of the tasks in turn, and their answers."""
    if not config.tasks:
        raise UserError("data.tasks: there are no tasks to generate text from; name at least one")
    tasks = [_Task(task, f"data.tasks[{i}]", hash_int("corpus", seed, i)) for i, task in enumerate(config.tasks)]
    for index in range(count):
        question, entry = tasks[index % len(tasks)].item(index)
        yield config.template.replace("{prompt}", question, 1)
        if entry["answer"]:
            yield entry["answer"]


class _Item(NamedTuple):
    task: _Task
    number: int
    question: str
    entry: dict[str, Any]  # the item of reasoning-gym

    @property
    def where(self) -> str:
        return f"{self.task.where} item {self.number}"

    @property
    def metadata(self) -> dict[str, Any]:
        config = {"config": self.task.config} if self.task.config else {}
        return {"source_dataset": self.task.name, "entry": self.entry, **config}


class _Mixture:
    """The weighted tasks of a stream."""

    def __init__(self, tasks: Sequence[TaskConfig], seed: int) -> None:
        self._seed = seed
        self._tasks = [_Task(task, f"data.tasks[{i}]", hash_int(seed, "task", i)) for i, task in enumerate(tasks)]
        self._weight_sums = list(itertools.accumulate(task.weight for task in tasks))

    def item(self, index: int, excluded: Container[str] = frozenset()) -> _Item:
        """Return the first draw for an index whose question is not excluded."""
        for draw in range(_MAX_DRAWS):
            point = hash_int(self._seed, "pick", index, draw) / 2**48 * self._weight_sums[-1]  # hash_int has 48 bits
            task = next(task for task, end in zip(self._tasks, self._weight_sums, strict=True) if point < end)
            # The first draw is the item with the number `index`. Later draws are random items.
            number = index if draw == 0 else hash_int(self._seed, "item", index, draw) >> 8  # below 2**40
            question, entry = task.item(number)
            if question not in excluded:
                return _Item(task, number, question, entry)
        raise UserError(
            f"data.tasks: {_MAX_DRAWS} draws in a row gave a question that is taken: the tasks have too few different "
            "ones; ask for fewer (data.held_out_prompts, --count) or widen the config of the tasks"
        )

    def distinct(self, count: int) -> Iterator[_Item]:
        """Yield `count` items with different questions."""
        questions: set[str] = set()
        for index in range(count):
            item = self.item(index, questions)
            questions.add(item.question)
            yield item


class _Task:
    def __init__(self, task: TaskConfig, where: str, seed: int) -> None:
        self.where = f"{where} ({task.name})"
        self.name = task.name
        self.config = dict(task.config)
        self._regex = self._pattern(task.prompt_regex, where) if task.prompt_regex else None
        self._items = gym.create(task.name, seed, task.config, where)

    def item(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return the question of an item, and its entry converted to JSON types."""
        with decimal.localcontext(decimal.DefaultContext):  # Some tasks set the precision of the process.
            entry = json.loads(json.dumps(self._items[index]))
        question: str = entry["question"]
        if self._regex is None:
            return question, entry
        match = self._regex.search(question)
        if match is None or not match[1]:
            raise UserError(
                f"{self.where}: prompt_regex = {self._regex.pattern!r} finds nothing in {question!r}; "
                'fix the pattern, or set prompt_regex = "" for the whole question'
            )
        return match[1], entry

    @staticmethod
    def _pattern(regex: str, where: str) -> re.Pattern[str]:
        try:
            pattern = re.compile(regex, re.DOTALL)
        except re.error as e:
            raise UserError(f"{where}.prompt_regex = {regex!r}: not a regular expression: {e}") from None
        if pattern.groups < 1:
            raise UserError(f"{where}.prompt_regex = {regex!r}: needs a group (...) around the prompt")
        return pattern


def hash_int(*key: int | str, size: int = 6) -> int:
    """Return an integer of `size` bytes that depends only on the key."""
    return int.from_bytes(hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=size).digest(), "big")
