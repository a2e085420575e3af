"""`brorl config`, `brorl init` and `brorl metrics`: configuration keys, a commented configuration, and metric names."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.load import json_schema, keys, suggestion, table_of
from megatron_brorl.config.rules import fixed_keys
from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.chat import has_chat_template
from megatron_brorl.data.hub import data_file
from megatron_brorl.errors import UserError
from megatron_brorl.files import write_text
from megatron_brorl.tracking import run_info
from megatron_brorl.tracking.metric_docs import sections
from megatron_brorl.tracking.metrics import METRICS_FILE

_WIDTH = 110

# The keys that `brorl init` writes. None stands for the default, which is written as a comment.
STARTER: dict[str, Any] = {
    "run.dir": "",  # derived from the name of the file
    "run.log": None,
    "model.path": "",
    "data.train": ["train.jsonl"],
    "data.held_out": [],
    "data.columns": {},
    "data.verifier": "math",
    "data.chat": False,
    "data.system_prompt": None,
    "data.template": None,
    "rollout.n": 32,
    "rollout.prompts": 64,
    "rollout.max_tokens": None,
    "rollout.stop_strings": None,
    "reward.extract": None,
    "algo.mini_batches": 4,
    "algo.mini_batch_of": "siblings",
    "optim.lr": None,
    "train.steps": None,
    "train.checkpoint_every": None,
    "evaluate.every": 10,
    "evaluate.samples": None,
    "evaluate.temperature": None,
    "evaluate.top_p": None,
}
# Comments below the descriptions of keys.
_NOTES = {
    "rollout.stop_strings": 'A small model that continues the few-shot examples of data.template needs ["\\n"].',
    "evaluate.temperature": "1.0, and 1.0 for top_p, evaluates a small model as it is sampled in training.",
}
_OWN_REWARD = "my_reward.py:score"


def add_commands(commands: Any) -> None:
    text = "print the keys of a configuration with type, default, bounds and description"
    command = commands.add_parser("config", help=text, description=text)
    command.add_argument("words", nargs="*", metavar="WORD", help="a section, a key or a part of a key")
    command.add_argument("--schema", action="store_true", help="print a JSON Schema for editors")
    command.set_defaults(command=_config, name="config")

    text = "write a commented configuration for your own model and data"
    command = commands.add_parser("init", help=text, description=text)
    command.add_argument("file", nargs="?", type=Path, default=Path("run.toml"), help="file to write (%(default)s)")
    command.add_argument("--model", default="", metavar="DIR", help="Hugging Face directory, or a name on the hub")
    text = "JSONL, Parquet or CSV file to train on; columns are detected from its first row"
    command.add_argument("--data", default="", metavar="FILE", help=text)
    command.add_argument("--held-out", default="", metavar="FILE", help="JSONL, Parquet or CSV file to evaluate on")
    for key in ("prompt", "answer", "task"):
        command.add_argument(f"--{key}", default="", metavar="COLUMN", help=f"column of the data: data.columns.{key}")
    text = 'data.verifier: "math", another verifier, or a function of your own, my_reward.py:score'
    command.add_argument("--reward", default="", metavar="NAME", help=text)
    command.set_defaults(command=_init, name="init")

    text = "explain the metrics of metrics.jsonl and summary.json"
    command = commands.add_parser("metrics", help=text, description=text)
    command.add_argument("words", nargs="*", metavar="WORD", help="a metric, a group, or a part of a name")
    command.set_defaults(command=_metrics, name="metrics")


def _config(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0

    # Search for sections and keys by name, and only then for keys that contain the word.
    words = args.words
    exact = [key for key in keys() if any(key == word or key.startswith((f"{word}.", f"{word}[]")) for word in words)]
    matches = exact or [key for key in keys() if not words or any(word in key for word in words)]
    if not matches:
        word = args.words[0]
        raise UserError(f"no key is called {word!r}; {suggestion(word) or '`brorl config` lists all of them'}")

    section = ""
    for key in matches:
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            print(f"\n[{section}]  {section_description(section)}")
        schema = keys()[key]
        default = f" = {to_toml(schema['default'])}" if "default" in schema else ""
        notes = [type_text(schema), *bounds(schema)]
        if ".".join(key.replace("[]", "").split(".")[:2]) in fixed_keys():
            notes.append("a resumed run must keep it")
        print("\n".join([f"{key}{default}   ({', '.join(notes)})", *_wrapped(description(key), "    ")]))
    return 0


def section_description(name: str) -> str:
    """Return the description of a section in one line."""
    table = table_of(json_schema()["properties"][name]) or {}
    return " ".join(table["description"].split())


def description(path: str) -> str:
    """Return the description of a key, or of the table that it holds."""
    schema = keys()[path]
    return str(schema.get("description") or " ".join((table_of(schema) or {})["description"].split()))


def type_text(schema: Mapping[str, Any]) -> str:
    """Return the type of a key in words, such as "list of string"."""
    if "enum" in schema:
        return " | ".join(map(to_toml, schema["enum"]))
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} numbers"
    if "items" in schema:
        return f"list of {type_text(schema['items'])}"
    return {None: "table", "object": "table"}.get(schema.get("type"), str(schema.get("type")))


def bounds(schema: Mapping[str, Any]) -> list[str]:
    """Return the bounds of a key in words."""
    names = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return [f"{words} {schema[name]:g}" for name, words in names.items() if name in schema]


def to_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _init(args: argparse.Namespace) -> int:
    if args.file.exists():
        raise UserError(f"{args.file.absolute()}: exists; name another file")

    # Two configurations must not share a run.dir.
    values = {**STARTER, "run.dir": run_dir(args.file)}
    notes = dict(_NOTES)
    columns = {key: name for key in ("prompt", "answer", "task") if (name := getattr(args, key))}
    options = {"model.path": args.model, "data.train": [args.data], "data.held_out": [args.held_out]}
    options |= {"data.columns": columns, "data.verifier": args.reward}
    values |= {key: value for key, value in options.items() if value not in ("", [""])}
    values["data.chat"], assumption = _assume_chat(args.model)
    missing = {"model.path": "a model"} if not args.model else {}  # key to fill in -> its meaning, for the user
    if not args.held_out:
        notes["data.held_out"] = "There is no file yet, so the run is not evaluated and reports no pass@1."
    if args.reward:
        from megatron_brorl.rewards.registry import entry

        entry(args.reward, "--reward")
    if args.data:
        from megatron_brorl.data.columns import guess_columns  # imports pyarrow, which is slow

        guess = guess_columns(data_file(args.data), columns)
        values["data.columns"] = guess.columns
        if guess.others:
            notes["data.columns"] = f'Rewards and environments receive as row["columns"]: {", ".join(guess.others)}.'
        if guess.is_chat:
            if args.model and Path(args.model).is_dir() and not values["data.chat"]:
                missing["model.path"] = "a model with a chat template, because the prompts are lists of messages"
            values["data.chat"], assumption = True, "data.chat = true: the prompts are lists of messages"
        if not (guess.is_scored or args.reward):
            values["data.verifier"] = _OWN_REWARD
            missing["data.verifier"] = "the rows have no answer, so write score(response, row), or name a verifier"
        from megatron_brorl.data.prompts import RowFormat, first_mistake  # imports torch, which is slow

        # The run would refuse the file if its first row has a mistake.
        row_format = RowFormat(values["data.verifier"], columns=ColumnsConfig(**values["data.columns"]))
        files = map(data_file, (*values["data.train"], *values["data.held_out"]))
        if mistake := next(filter(None, (first_mistake(file, row_format) for file in files)), ""):
            missing["data.columns"] = mistake
    else:
        missing["data.train"] = "a file with rows"

    notes |= {key: f"FILL IN: {what}. {notes.get(key, '')}" for key, what in missing.items()}
    write_text(args.file, starter(values, notes))
    print(f"written: {args.file.absolute()}")
    print(assumption)
    print("every other key: brorl config   for an editor: brorl config --schema > brorl.schema.json")
    if missing:
        print(f"fill in: {'; '.join(f'{key} ({what})' for key, what in missing.items())}")
    print(f"next: brorl train --dry-run {shlex.quote(str(args.file))}")
    return 0


def run_dir(file: Path) -> str:
    """Return a run.dir for a configuration file: its path below the working directory, without suffix, in runs/.

    Raises UserError if that folder already contains a run.
    """
    # A file outside of the working directory contributes only its name.
    path = Path(os.path.abspath(file))
    here = Path.cwd()
    below = path.relative_to(here) if path.is_relative_to(here) else Path(path.name)
    folder = Path("runs") / (below.relative_to("runs") if below.is_relative_to("runs") else below).with_suffix("")

    # `brorl train` would continue that run, or refuse to.
    if any((folder / name).exists() for name in (METRICS_FILE, run_info.FILE, "checkpoints")):
        raise UserError(
            f"{path}: its run.dir would be {folder}, which already contains a run; choose another file name"
        )
    return str(folder)


def starter(values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return the TOML file of some keys, each below its description and its note. None writes the default as a comment.

    notes: by key.
    """
    section = ""
    lines: list[str] = []
    for path, value in values.items():
        if path.partition(".")[0] != section:
            section = path.partition(".")[0]
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        name = path.partition(".")[2]
        line = f"# {name} = {to_toml(keys()[path]['default'])}" if value is None else f"{name} = {to_toml(value)}"
        lines += [*_wrapped(description(path), "# "), *_wrapped(notes.get(path, ""), "# "), line]
    return "\n".join(lines) + "\n"


def _assume_chat(model: str) -> tuple[bool, str]:
    """Return data.chat for a model, and a line that gives the reason."""
    if not model or not Path(model).is_dir():
        reason = f"{model or 'model.path'} is not a directory here; set it to true if there is a chat template"
        return False, f"data.chat = false: {reason}"
    if has_chat_template(Path(model)):
        return True, f"data.chat = true: {model} has a chat template, and every prompt becomes a user message in it"
    return False, f"data.chat = false: {model} has no chat template, and prompts are plain text in data.template"


def _metrics(args: argparse.Namespace) -> int:
    known = [(section, metric) for section in sections() for metric in section.metrics]
    words = [word.removeprefix("time.") for word in args.words]
    # Search for exact names and groups, and only then for parts of names.
    matches = [
        (topic, metric)
        for topic, metric in known
        if not words or any(metric.matches(word) or word in (topic.group, topic.title, metric.name) for word in words)
    ]
    matches = matches or [pair for pair in known if any(word in pair[1].name for word in words)]
    if not matches:
        near = difflib.get_close_matches(words[0], [metric.name for _, metric in known], n=1)
        hint = f"did you mean {near[0]}?" if near else "`brorl metrics` lists all of them"
        raise UserError(f"no metric is called {words[0]!r}; {hint}")

    for section in dict.fromkeys(section for section, _ in matches):
        print(f"\n{section.title}: {_plain(section.about)}")
        for metric in (metric for topic, metric in matches if topic is section):
            print(f"{metric.name}   ({metric.unit})")
            for text in filter(None, (metric.meaning, metric.bad and f"bad: {metric.bad}")):
                print("\n".join(_wrapped(_plain(text), "    ")))
    return 0


def _plain(text: str) -> str:
    """Return the text without Markdown."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
