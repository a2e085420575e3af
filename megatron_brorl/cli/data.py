"""`brorl data`: published sets and reasoning-gym's tasks to files of rows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from megatron_brorl.cli.files import write_text
from megatron_brorl.data.sets.form import DataSet
from megatron_brorl.data.sets.own import Custom
from megatron_brorl.data.sets.table import CUSTOM, SETS
from megatron_brorl.errors import UserError
from megatron_brorl.outputs import check_output


def add_commands(commands: Any) -> None:
    """Add `brorl data` to the parser."""
    # `brorl data` alone is a question.
    data = commands.add_parser("data", help="prepare data sets for training and evaluation")
    actions = data.add_subparsers(metavar="action")
    data.set_defaults(command=lambda _: _help(data))

    # Published files to rows.
    text = "published files to rows with verifiers: no duplicates, no problems of evaluations, a data card"
    command = actions.add_parser(
        "prepare",
        help=text,
        description=text,
        epilog="sets: " + "; ".join(f"{name} ({s.licence})" for name, s in SETS.items()) + f"; {CUSTOM} (any columns)",
    )

    # What goes in and what comes out.
    command.add_argument("source", metavar="SOURCE", help="name of the set, see below")
    command.add_argument(
        "inputs", metavar="INPUT", nargs="+", type=Path, help=".jsonl, .json, .parquet, .csv, or a save_to_disk folder"
    )
    command.add_argument("--out", required=True, type=Path, help="FILE.jsonl or FILE.parquet")
    command.add_argument("--verifier", default="", help="instead of the set's own")
    command.add_argument("--instruction", help="what follows every problem (default: by verifier; '' for nothing)")

    # What is left out.
    command.add_argument("--tokenizer", type=Path, metavar="DIR", help="a model's folder, for --max-prompt-tokens")
    command.add_argument("--max-prompt-tokens", type=int, default=0, metavar="N", help="drop longer prompts")
    command.add_argument(
        "--decontaminate",
        nargs="+",
        action="extend",
        default=[],
        metavar="[SET=]FILE",
        help="drop problems of these evaluations; SET is 'rows' where it is left out",
    )
    command.add_argument("--ngram", type=int, default=13, help="words in a row that count as the same (%(default)s)")

    # A file of any columns.
    command.add_argument("--prompt", metavar="COLUMN", help=f"of {CUSTOM}: the problem")
    command.add_argument("--answer", metavar="COLUMN", help=f"of {CUSTOM}: the answer")
    command.add_argument("--answer-regex", metavar="R", help=f"of {CUSTOM}: the last match's first group is the answer")
    command.add_argument("--licence", help=f"of {CUSTOM} and rows: for the data card")
    command.set_defaults(command=_prepare, name="data prepare")

    # Tasks as a file, which mixtures take.
    text = "rows of a configuration's reasoning-gym tasks (data.tasks), to be mixed with others"
    command = actions.add_parser("generate", help=text, description=text)
    command.add_argument("config", help="TOML file with [[data.tasks]]")
    command.add_argument("--count", required=True, type=int, help="rows, of different text")
    command.add_argument("--out", required=True, type=Path, help="FILE.jsonl")
    command.add_argument("--seed", type=int, default=0, help="of the tasks (%(default)s)")
    command.set_defaults(command=_generate, name="data generate")


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from megatron_brorl.data.prepare.card import data_card
    from megatron_brorl.data.prepare.files import files_of
    from megatron_brorl.data.prepare.prepare import Job, prepare
    from megatron_brorl.data.tokenizers import load_tokenizer
    from megatron_brorl.rewards.registry import entry

    # Options that would do nothing, or nothing good.
    if args.max_prompt_tokens < 0 or bool(args.max_prompt_tokens) != bool(args.tokenizer):
        raise UserError("--max-prompt-tokens N needs --tokenizer DIR, and the other way round; N must be above 0")
    # A run of no words would be in every problem.
    if args.ngram < 1:
        raise UserError(f"--ngram {args.ngram}: must be at least 1")
    if args.verifier:
        entry(args.verifier, "--verifier")

    # The same job for a published set and for a file of the user's own.
    job = Job(
        name=args.source,
        data_set=_data_set(args),
        inputs=args.inputs,
        out=args.out,
        verifier=args.verifier,
        instruction=args.instruction,
        tokenizer=load_tokenizer(args.tokenizer) if args.tokenizer else None,
        max_prompt_tokens=args.max_prompt_tokens,
        evaluations=[_evaluation(item) for item in args.decontaminate],
        n=args.ngram,
    )

    # Nothing that is read may be written over.
    read = [("an input", path) for item in args.inputs for path in files_of(item)]
    read += [("an evaluation", path) for _, item in job.evaluations for path in files_of(item)]
    for output in (job.out, job.dropped, job.card):
        check_output(output, read)

    # The card comes last: where there is one, the rows are complete.
    counts = prepare(job)
    write_text(job.card, data_card(job, counts, _command(args)))

    # What a person reads.
    print(f"{job.out}: {counts.kept} of {sum(counts.read.values())} rows")
    for reason, count in sorted(counts.dropped.items()):
        print(f"  dropped {count}: {reason}")

    # Where to look further, and what must not be done with it.
    print(f"written beside it: {job.card.name}, {job.dropped.name}")
    if job.data_set.evaluation:
        print(f"{args.source} is an evaluation set: do not train on it")
    return 0


def _generate(args: argparse.Namespace) -> int:
    from megatron_brorl.config.load import load
    from megatron_brorl.data.generate import generated_rows

    # Mistakes before items, of which some take a second to make.
    tasks = load(args.config).data.tasks
    if not tasks:
        raise UserError(f"{args.config}: data.tasks: there are no tasks to generate rows of; name at least one")
    if args.count < 1:
        raise UserError(f"--count {args.count}: must be at least 1")
    if args.out.suffix != ".jsonl":
        raise UserError(f"--out {args.out}: must end in .jsonl")
    check_output(args.out, [("the configuration", Path(args.config))])

    rows = generated_rows(tasks, args.seed, args.count)
    write_text(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.out}: {args.count} rows of {', '.join(task.name for task in tasks)}")
    return 0


def _data_set(args: argparse.Namespace) -> DataSet:
    own = {"--prompt": args.prompt, "--answer": args.answer, "--answer-regex": args.answer_regex}
    if args.source == CUSTOM:
        if not args.prompt:
            raise UserError(f"{CUSTOM}: give --prompt COLUMN, and --answer COLUMN where there are answers")
        convert = Custom(args.prompt, args.answer or "", args.answer_regex or "")
        return DataSet("columns named by hand", "your own", args.licence or "not stated", convert)

    # Options that would be ignored are refused.
    if args.source not in SETS:
        raise UserError(f"no data set is called {args.source!r}; known: {', '.join(SETS)}, {CUSTOM}")
    for option, value in own.items():
        if value is not None:
            raise UserError(f"{option} is of the set {CUSTOM!r}: {args.source!r} knows its columns")
    if args.licence and args.source != "rows":
        raise UserError(f"--licence: that of {args.source!r} is known: {SETS[args.source].licence}")
    found = SETS[args.source]
    return dataclasses.replace(found, licence=args.licence) if args.licence else found


def _evaluation(item: str) -> tuple[str, Path]:
    """("gsm8k", file) of "gsm8k=file"; a file alone has rows of this project."""
    name, eq, path = item.partition("=")
    return (name, Path(path)) if eq and name in SETS else ("rows", Path(item))


def _command(args: argparse.Namespace) -> str:
    """The command again, its options in one order."""
    words = ["brorl", "data", "prepare", args.source, *map(str, args.inputs), "--out", str(args.out)]
    for option in ("verifier", "instruction", "tokenizer", "max_prompt_tokens", "prompt", "answer", "answer_regex"):
        value = getattr(args, option)
        if value or (option == "instruction" and value is not None):
            words += [f"--{option.replace('_', '-')}", str(value)]
    if args.licence:
        words += ["--licence", args.licence]
    if args.decontaminate:
        words += ["--ngram", str(args.ngram), "--decontaminate", *args.decontaminate]
    return shlex.join(words)
