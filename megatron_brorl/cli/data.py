"""`brorl data`: convert published data sets and reasoning-gym tasks to files of rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_brorl.data.hub import data_file
from megatron_brorl.data.published_sets import SETS, DataSet
from megatron_brorl.errors import UserError
from megatron_brorl.files import check_output, write_text

CUSTOM = "custom"  # any file; options name its columns


def add_commands(commands: Any) -> None:
    data = commands.add_parser("data", help="prepare data sets for training and evaluation")
    actions = data.add_subparsers(required=True, dest="action", metavar="prepare | generate")

    text = "convert a data set to rows with verifiers, drop duplicates and evaluation problems, and write a data card"
    sets = "sets: " + "; ".join(f"{name} ({s.licence})" for name, s in SETS.items()) + f"; {CUSTOM} (any columns)"
    command = actions.add_parser("prepare", help=text, description=text, epilog=sets)
    command.add_argument("source", metavar="SET", help="name of the set, see below")
    text = ".jsonl, .json, .parquet, .csv, or hf://datasets/OWNER/NAME/FILE"
    command.add_argument("inputs", metavar="INPUT", nargs="+", help=text)
    command.add_argument("--out", required=True, type=Path, help="file to write (.jsonl)")
    command.add_argument("--verifier", default="", help="verifier to use instead of that of the set")
    text = "text to append to every problem (default: by verifier; '' appends nothing)"
    command.add_argument("--instruction", help=text)
    text = "folder of the model whose tokenizer counts --max-prompt-tokens"
    command.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)
    command.add_argument("--max-prompt-tokens", type=int, default=0, metavar="N", help="drop longer prompts")
    text = "drop problems of these evaluations; the default SET is 'rows'"
    option: Any = {"nargs": "+", "action": "extend", "default": [], "metavar": "[SET=]FILE"}
    command.add_argument("--decontaminate", **option, help=text)
    command.add_argument("--prompt", metavar="COLUMN", help=f"for {CUSTOM}: column of the problem")
    command.add_argument("--answer", default="", metavar="COLUMN", help=f"for {CUSTOM}: column of the answer")
    text = f"for {CUSTOM}: the answer is the first group of the last match of this pattern"
    command.add_argument("--answer-regex", default="", metavar="R", help=text)
    command.set_defaults(command=_prepare, name="data prepare")

    text = "write rows of the reasoning-gym tasks of a configuration (data.tasks), to be mixed with other rows"
    command = actions.add_parser("generate", help=text, description=text)
    command.add_argument("config", help="TOML file with [[data.tasks]]")
    command.add_argument("--count", required=True, type=int, help="number of rows, all with different texts")
    command.add_argument("--out", required=True, type=Path, help="file to write (.jsonl)")
    command.add_argument("--seed", type=int, default=0, help="seed of the tasks (%(default)s)")
    command.set_defaults(command=_generate, name="data generate")


def _prepare(args: argparse.Namespace) -> int:
    from megatron_brorl.data.prepare import Job, prepare
    from megatron_brorl.data.tokenizers import load_tokenizer
    from megatron_brorl.rewards.registry import entry

    if args.max_prompt_tokens < 0 or bool(args.max_prompt_tokens) != bool(args.tokenizer):
        raise UserError("--max-prompt-tokens N needs --tokenizer DIR, and vice versa; N must be above 0")
    if args.out.suffix != ".jsonl":
        raise UserError(f"--out {args.out}: must end in .jsonl")
    if args.verifier:
        entry(args.verifier, "--verifier")
    job = Job(
        name=args.source,
        data_set=_data_set(args),
        inputs=[data_file(name) for name in args.inputs],
        out=args.out,
        verifier=args.verifier,
        instruction=args.instruction,
        tokenizer=load_tokenizer(args.tokenizer) if args.tokenizer else None,
        max_prompt_tokens=args.max_prompt_tokens,
        evaluations=[_evaluation(item) for item in args.decontaminate],
    )
    input_files = [("an input", path) for path in job.inputs] + [("an evaluation", path) for _, path in job.evaluations]
    for output in (job.out, job.dropped, job.card):
        check_output(output, input_files)

    counts = prepare(job)
    print(f"{job.out}: {counts.kept} of {sum(counts.read.values())} rows")
    for reason, count in sorted(counts.dropped.items()):
        print(f"  dropped {count}: {reason}")
    if counts.letters:
        print(f"  {counts.letters} rows: verifier math compares letters of the answer as text (docs/verifiers_math.md)")
    print(f"also written: {job.card.name}, {job.dropped.name}")
    if job.data_set.test:
        print(f"{args.source} is an evaluation set: do not train on it")
    return 0


def _generate(args: argparse.Namespace) -> int:
    from megatron_brorl.config.load import load
    from megatron_brorl.data.generate import generated_rows

    # Check the arguments first, because generating a row may take a second.
    tasks = load(args.config).data.tasks
    if not tasks:
        raise UserError(f"{args.config}: data.tasks: no tasks to generate rows of; add at least one")
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
    if args.source == CUSTOM:
        if not args.prompt:
            raise UserError(f"{CUSTOM}: --prompt COLUMN is missing; add --answer COLUMN too if there are answers")
        return DataSet(
            "", licence="your own", verifier="", prompt=args.prompt, answer=args.answer, answer_regex=args.answer_regex
        )
    if args.source not in SETS:
        raise UserError(f"no data set is called {args.source!r}; known: {', '.join(SETS)}, {CUSTOM}")
    if args.prompt or args.answer or args.answer_regex:
        raise UserError(f"--prompt, --answer and --answer-regex are for {CUSTOM!r}: {args.source!r} has known columns")
    return SETS[args.source]


def _evaluation(item: str) -> tuple[str, Path]:
    """Return ("gsm8k", file) for "gsm8k=file", or ("rows", file) for a plain file with rows of this project."""
    name, equals, path = item.partition("=")
    return (name, data_file(path)) if equals and name in SETS else ("rows", data_file(item))
