"""The keys of [data]: files, mixtures of them, generated tasks, and how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.config.bounds import at_least


@dataclass(frozen=True)
class ColumnsConfig:
    """Which columns of a file are what. Where one is named, other columns are left alone; "a.b" is b within a.

    Sources of a mixture share one mapping; `brorl data prepare custom` makes rows of a file with other columns.
    """

    prompt: str = ""  # text, or a list of messages; "" = "prompt"
    answer: str = ""  # the reference answer, text or a number; "" = "answer"
    # The reference answer within that column: the first group of the last match, e.g. '#### (.+)'; "" = all of it
    answer_regex: str = ""
    target: str = ""  # what `brorl sft` imitates, where that is not the answer; "" = "target"
    verifier: str = ""  # the name of the row's verifier; "" = "verifier"
    id: str = ""  # unique in its file; "" = "id"
    metadata: str = ""  # what the verifier needs besides the answer; "" = "metadata"


@dataclass(frozen=True)
class TaskConfig:
    """One reasoning-gym task of a generated data set."""

    name: str  # as reasoning-gym calls it
    weight: float = 1.0  # share of the prompts, over the sum of all weights
    prompt_regex: str = ""  # regex; its first group is the prompt (strips the English template); "" = whole question
    config: dict[str, Any] = field(default_factory=dict)  # keywords of reasoning_gym.create_dataset


@dataclass(frozen=True)
class MixtureConfig:
    """One source of a mixture of files."""

    files: tuple[str, ...]  # JSONL or Parquet files, over and over, each epoch of this source in an order of its own
    weight: float  # share of the prompts, over the sum of all weights; met exactly
    name: str = ""  # in reports; "" = the first file's name without its ending
    verifier: str = ""  # of rows that name none; "" = as for other files


@dataclass(frozen=True)
class DataConfig:
    # JSONL or Parquet: paths, or hf://datasets/OWNER/NAME/FILE of Hugging Face's hub, for every key with files
    train: tuple[str, ...] = ()  # files, over and over, each epoch in an order of its own
    mixture: tuple[MixtureConfig, ...] = ()  # instead of train: several sources, each with its share of every step
    held_out: tuple[str, ...] = ()  # files that are evaluated and never trained on
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)  # of files that are not in this project's form.
    tasks: tuple[TaskConfig, ...] = ()  # generated instead of files
    train_seed: int = 1  # of the generated training prompts
    held_out_seed: int = 2  # of the generated held-out prompts
    held_out_prompts: int = at_least(1, default=512)  # how many are generated; files are used whole
    verifier: str = "exact"  # of rows that name none; "my_rewards.py:score" is one of your own (docs/verifiers.md)
    template: str = "{prompt}"  # wraps the text of every prompt
    # Apply the tokenizer's chat template: to the prompt as one user message, or to a row's list of messages
    chat: bool = False
    system_prompt: str = ""  # a system message before those of every row; needs chat
    # Variables of the chat template, such as {enable_thinking = false}; needs chat
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
