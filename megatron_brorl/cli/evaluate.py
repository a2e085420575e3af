"""`brorl evaluate`: evaluate a model; `brorl compare`: compare two evaluations."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from megatron_brorl.config.load import load
from megatron_brorl.errors import UserError, warn
from megatron_brorl.files import read_object, write_json, write_text
from megatron_brorl.tracking.progress import progress

ANSWERS = "evaluation.jsonl"


def evaluate(args: argparse.Namespace) -> int:
    """Sample and score, and write evaluation.json, .jsonl (one line per prompt), .md and .png to run.dir."""
    from megatron_brorl.cli.session import Session
    from megatron_brorl.report.comparison import evaluation_figure, evaluation_markdown
    from megatron_brorl.report.plots import save
    from megatron_brorl.train.evaluate import mean_over, sample_answers, summarize
    from megatron_brorl.train.recorder import sample_lines
    from megatron_brorl.train.sampling_params import evaluation_sampling_params
    from megatron_brorl.train.weight_sync import sync_weights

    config = load(args.config, args.overrides)
    with progress(total=0, title="evaluate") as p, Session(config, benchmarks=True) as session:
        benchmarks = session.benchmarks
        if not benchmarks:
            raise UserError(f"{args.config}: nothing to evaluate on; give --benchmark, data.held_out or data.tasks")
        session.check_verifiers([prompt for prompts in benchmarks.values() for prompt in prompts])
        runner = session.rollouts()
        sync_weights(session.worker(optim=None), runner.engine, version=0)

        evaluation = config.evaluate
        sampling = evaluation_sampling_params(config, session.stop_ids)

        def print_samples(name: str, groups: Any, rollouts: Any, _: Any) -> None:
            for text in sample_lines(groups, rollouts, session.tokenizer.decode, session.stop_ids):
                p.note(f"{name} {text}")

        p.begin(len(benchmarks))
        p.note(session.report)
        answers = {}
        for number, (name, prompts) in enumerate(benchmarks.items(), start=1):
            on_samples = functools.partial(print_samples, name)
            answers[name] = sample_answers(runner, prompts, evaluation.samples, sampling, on_samples)
            p.update(number, {})
        p.stop()
        all_answers = [answer for results in answers.values() for answer in results]
        overall = summarize(all_answers, sum(map(len, benchmarks.values())), evaluation, runner.seed)

        result = {
            **overall.as_dict(),
            "benchmarks": {
                name: summarize(answers[name], len(prompts), evaluation, runner.seed).as_dict()
                for name, prompts in benchmarks.items()
            },
            "mean_of_benchmarks": mean_over(list(answers.values()), runner.seed),
            "model": config.model.path,
            # Two evaluations have the same prompts only if these are equal.
            "chat_template_kwargs": config.data.chat_template_kwargs,
            "template_date": str(session.template_date) if session.template_date else None,
            "sampling": {key: getattr(sampling, key) for key in ("temperature", "top_p", "max_tokens")},
        }

        if session.is_main_rank:
            lines = [{"benchmark": name, **answer.as_dict()} for name, results in answers.items() for answer in results]
            write_text(session.dir / ANSWERS, "".join(json.dumps(line) + "\n" for line in lines))
            write_json(session.dir / "evaluation.json", result)
            table = evaluation_markdown(result)
            write_text(session.dir / "evaluation.md", table)
            figure = save(evaluation_figure(result), session.dir / "evaluation.png")

            print(table)
            if overall.lost:
                print(overall.remark())
            print(f"written to {session.dir / 'evaluation.json'}, {ANSWERS}, evaluation.md and {figure.name}")
    return 0


def add_compare(commands: Any) -> None:
    text = "compare two evaluations of the same prompts: paired t-test, paired bootstrap, response length"
    command = commands.add_parser("compare", help=text, description=text)
    command.add_argument("before", metavar="A", type=Path, help="run.dir of an evaluation")
    command.add_argument("after", metavar="B", type=Path, help="run.dir of another evaluation of the same prompts")
    command.add_argument("--out", type=Path, help="folder for compare.json, .md and .png (default: B)")
    command.set_defaults(command=_compare, name="compare")


def _compare(args: argparse.Namespace) -> int:
    from megatron_brorl.report.comparison import compare, comparison_figure, markdown, read_answers
    from megatron_brorl.report.plots import save

    out = args.out or args.after

    # compare() matches prompts by id, which does not depend on the date that the chat template writes into them.
    remedy = "write it with brorl evaluate, or compare training runs with brorl report A B"
    folders = (args.before, args.after)
    dates = [read_object(folder / "evaluation.json", remedy).get("template_date") for folder in folders]
    if dates[0] != dates[1]:
        warn(f"the chat templates wrote other dates: {dates[0]} and {dates[1]}")
    before, after = (read_answers(directory.absolute() / ANSWERS) for directory in folders)
    result = compare(before, after, str(args.before), str(args.after))

    write_json(out / "compare.json", result)
    table = markdown(result)
    write_text(out / "compare.md", table)
    figure = save(comparison_figure(result), out / "compare.png")

    print(table)
    print(f"written to {out / 'compare.json'}, compare.md and {figure.name}")
    return 0
