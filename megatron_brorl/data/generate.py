"""Prompts of reasoning-gym tasks: an endless stream in which prompt i depends only on (tasks, seed, i).

Nothing is stored to resume it, any rank can make any part of it, and Python's random state is not touched.
"""

from __future__ import annotations

import decimal
import hashlib
import itertools
import json
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any

from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.prompts import Written, render
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifiers import gym
from megatron_brorl.types import Prompt

_MAX_DRAWS = 1000
_CHECKED = 64  # prompts that are encoded and decoded as a check


class GeneratedPrompts:
    """Prompts of the weighted tasks of a configuration, without the texts in `exclude`."""

    verifier = "reasoning_gym"

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        exclude: frozenset[str] = frozenset(),
    ) -> None:
        self._config, self._seed, self._exclude = config, seed, exclude
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._mixture = _Mixture(config.tasks, seed)

    def prompt(self, index: int) -> Prompt:
        """Return one prompt of the stream."""
        return self._first_outside(self._exclude, index)

    def held_out(self, count: int) -> list[Prompt]:
        """Return prompts of different text."""
        found: dict[str, Prompt] = {}
        for index in range(count):
            prompt = self._first_outside(found, index)
            found[prompt.text] = prompt
        return list(found.values())

    def written(self) -> list[Written]:
        """Return the first texts and answers of the stream without a template."""
        found: list[Written] = []
        for index in range(_CHECKED):
            task, number = self._mixture.pick(index, 0)
            text, entry = task.item(number)
            found.append((f"{task.where} item {number}", (text, entry["answer"])))
        return found

    def _first_outside(self, taken: Container[str], index: int) -> Prompt:
        for draw in range(_MAX_DRAWS):
            prompt = self._make(index, draw)
            if prompt.text not in taken:
                return prompt
        raise UserError(
            f"data.tasks: {_MAX_DRAWS} draws in a row gave a text that is held out already: the tasks have too few "
            "different prompts; lower data.held_out_prompts or widen the config of the tasks"
        )

    def _make(self, index: int, draw: int) -> Prompt:
        task, number = self._mixture.pick(index, draw)
        text, entry = task.item(number)
        text, ids = render(text, self._tokenizer, self._config, self._max_prompt_tokens, f"{task.where} item {number}")
        prompt_id = f"{task.name}:{self._seed}:{index}"
        return Prompt(prompt_id, text, ids, entry["answer"], self.verifier, _metadata(task, entry))


def generated_rows(tasks: Sequence[TaskConfig], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of a data file with different texts. Raises UserError if the tasks have fewer."""
    mixture, taken = _Mixture(tasks, seed), set()
    for index in range(count):
        for draw in range(_MAX_DRAWS):
            task, number = mixture.pick(index, draw)
            text, entry = task.item(number)
            if text not in taken:
                break
        else:
            raise UserError(
                f"data.tasks: after {index} rows, {_MAX_DRAWS} draws in a row gave a text that was there already; ask "
                "for fewer rows or widen the config of the tasks"
            )
        taken.add(text)
        yield {
            "id": f"{task.name}:{seed}:{index + 1}",  # the number of its line, as in error messages
            "prompt": text,
            "answer": entry["answer"],
            "verifier": GeneratedPrompts.verifier,
            "metadata": _metadata(task, entry),
        }


def corpus(config: DataConfig, seed: int, count: int) -> Iterator[str]:
    """Yield texts to train a tokenizer on: `count` prompts of the tasks in turn, and their answers."""
    if not config.tasks:
        raise UserError("data.tasks: there are no tasks to generate text from; name at least one")
    tasks = [_Task(task, f"data.tasks[{i}]", _draw("corpus", seed, i)) for i, task in enumerate(config.tasks)]
    for index in range(count):
        text, entry = tasks[index % len(tasks)].item(index)
        yield config.template.replace("{prompt}", text, 1)
        if entry["answer"]:
            yield entry["answer"]


def _metadata(task: _Task, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that verifier "reasoning_gym" needs."""
    return {"source_dataset": task.name, "entry": entry, **({"config": task.config} if task.config else {})}


class _Mixture:
    """The weighted tasks of a stream."""

    def __init__(self, tasks: Sequence[TaskConfig], seed: int) -> None:
        self._seed = seed
        self._tasks = [_Task(task, f"data.tasks[{i}]", _draw(seed, "task", i)) for i, task in enumerate(tasks)]
        self._until = list(itertools.accumulate(task.weight for task in tasks))

    def pick(self, index: int, draw: int) -> tuple[_Task, int]:
        """Return the task of an index, and the number of its item, which is the index itself at the first draw."""
        point = _draw(self._seed, "pick", index, draw) / 2**48 * self._until[-1]
        task = next(task for task, until in zip(self._tasks, self._until, strict=True) if point < until)
        return task, index if draw == 0 else _draw(self._seed, "item", index, draw) >> 8


class _Task:
    def __init__(self, task: TaskConfig, where: str, seed: int) -> None:
        self.where, self.name, self.config = f"{where} ({task.name})", task.name, dict(task.config)
        self._regex = self._pattern(task.prompt_regex, where) if task.prompt_regex else None
        self._items = gym.create(task.name, seed, task.config, where)

    def item(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return the text and the entry of an item, the entry as JSON would hold it."""
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


def _draw(*key: int | str) -> int:
    """Return a number below 2**48 that depends only on the key."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
