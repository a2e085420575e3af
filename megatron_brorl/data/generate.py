"""An endless stream of generated prompts: prompt i is a pure function of (tasks, seed, i).

Nothing is stored to resume it, any rank can make any part of it, and the random state of Python is not touched.
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
from megatron_brorl.data.prompts import render
from megatron_brorl.data.round_trip import Written
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import gym_tasks
from megatron_brorl.types import Prompt

_ATTEMPTS = 1000


class GeneratedPrompts:
    """Prompts of the weighted tasks of `config`, none of which has a text in `exclude`."""

    verifier = "reasoning_gym"  # of all of them

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
        """Number `index` of the stream."""
        return self._first_outside(self._exclude, index)

    def held_out(self, count: int) -> list[Prompt]:
        """`count` prompts of different text."""
        found: dict[str, Prompt] = {}
        for index in range(count):
            prompt = self._first_outside(found, index)
            found[prompt.text] = prompt
        return list(found.values())

    def written(self, count: int) -> list[Written]:
        """The first `count` rows of the stream as their tasks wrote them, held-out ones among them."""
        found = []
        for index in range(count):
            task, number = self._mixture.pick(index, 0)
            text, entry = task.item(number)
            found.append(Written(f"{task.where} item {number}", text, entry["answer"]))
        return found

    def _first_outside(self, taken: Container[str], index: int) -> Prompt:
        for attempt in range(_ATTEMPTS):
            prompt = self._make(index, attempt)
            if prompt.text not in taken:
                return prompt
        raise UserError(
            f"data.tasks: {_ATTEMPTS} draws in a row gave a text that is held out already: the tasks have too few "
            "different prompts; lower data.held_out_prompts or widen the config of the tasks"
        )

    def _make(self, index: int, attempt: int) -> Prompt:
        task, number = self._mixture.pick(index, attempt)
        text, entry = task.item(number)
        text, ids = render(text, self._tokenizer, self._config, self._max_prompt_tokens, f"{task.where} item {number}")
        prompt_id = f"{task.name}:{self._seed}:{index}"
        return Prompt(prompt_id, text, ids, entry["answer"], self.verifier, _metadata(task, entry))


def generated_rows(tasks: Sequence[TaskConfig], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Rows of a data file: `count` prompts of different text, as their tasks wrote them, without a template.

    Raises UserError where the tasks have fewer.
    """
    mixture, taken = _Mixture(tasks, seed), set()
    for index in range(count):
        # Tasks of few different items are drawn again.
        for attempt in range(_ATTEMPTS):
            task, number = mixture.pick(index, attempt)
            text, entry = task.item(number)
            if text not in taken:
                break
        else:
            raise UserError(
                f"data.tasks: after {index} rows, {_ATTEMPTS} draws in a row gave a text that was there already; ask "
                "for fewer rows or widen the config of the tasks"
            )

        # As a file's row, so that mixtures and cards treat it as any other.
        taken.add(text)
        yield {
            "id": f"{task.name}:{seed}:{index + 1}",  # the number of its line, as in error messages
            "prompt": text,
            "answer": entry["answer"],
            "verifier": GeneratedPrompts.verifier,
            "metadata": _metadata(task, entry),
        }


def corpus(config: DataConfig, seed: int, count: int) -> Iterator[str]:
    """Texts to train a tokenizer on before there is one: `count` prompts of the tasks in turn, and their answers."""
    if not config.tasks:
        raise UserError("data.tasks: there are no tasks to generate text from; name at least one")
    tasks = [_Task(task, f"data.tasks[{i}]", _draw("corpus", seed, i)) for i, task in enumerate(config.tasks)]
    for index in range(count):
        text, entry = tasks[index % len(tasks)].item(index)
        yield config.template.replace("{prompt}", text, 1)
        if entry["answer"]:
            yield entry["answer"]


def _metadata(task: _Task, entry: dict[str, Any]) -> dict[str, Any]:
    """What verifier "reasoning_gym" asks of a row."""
    return {"source_dataset": task.name, "entry": entry, **({"config": task.config} if task.config else {})}


class _Mixture:
    """The weighted tasks of a stream."""

    def __init__(self, tasks: Sequence[TaskConfig], seed: int) -> None:
        self._seed = seed
        self._tasks = [_Task(task, f"data.tasks[{i}]", _draw(seed, "task", i)) for i, task in enumerate(tasks)]
        self._until = list(itertools.accumulate(task.weight for task in tasks))

    def pick(self, index: int, attempt: int) -> tuple[_Task, int]:
        """The task that `index` stands for, and the number of its item: at the first attempt `index` itself."""
        point = _draw(self._seed, "pick", index, attempt) / 2**48 * self._until[-1]
        task = next(task for task, until in zip(self._tasks, self._until, strict=True) if point < until)
        return task, index if attempt == 0 else _draw(self._seed, "item", index, attempt) >> 8


class _Task:
    def __init__(self, task: TaskConfig, where: str, seed: int) -> None:
        self.where, self.name, self.config = f"{where} ({task.name})", task.name, dict(task.config)
        self._regex = self._pattern(task.prompt_regex, where) if task.prompt_regex else None
        self._items = gym_tasks.create(task.name, seed, task.config, where)

    def item(self, index: int) -> tuple[str, dict[str, Any]]:
        """Text and entry of an item, the entry as it would come out of a JSON file."""
        with decimal.localcontext(decimal.DefaultContext):  # some tasks set the precision, for all that come after
            entry = json.loads(json.dumps(self._items[index]))
        question: str = entry["question"]
        if self._regex is None:
            return question, entry
        match = self._regex.search(question)
        if match is None or not match[1]:
            raise UserError(
                f"{self.where}: prompt_regex = {self._regex.pattern!r} finds nothing in {question!r}; "
                'mend the pattern, or set prompt_regex = "" for the whole question'
            )
        return match[1], entry

    @staticmethod
    def _pattern(regex: str, where: str) -> re.Pattern[str]:
        try:
            pattern = re.compile(regex, re.DOTALL)
        except re.error as e:
            raise UserError(f"{where}.prompt_regex = {regex!r}: not a regular expression: {e}") from None
        if pattern.groups < 1:
            raise UserError(f"{where}.prompt_regex = {regex!r}: needs a group (...) around what is to be the prompt")
        return pattern


def _draw(*key: int | str) -> int:
    """A number below 2**48 that depends on the key only."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
