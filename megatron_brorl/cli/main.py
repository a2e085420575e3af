"""Entry point of the command line. Most commands are imported when they run, because they import torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron_brorl import __version__, signals
from megatron_brorl.cli import config as config_cli
from megatron_brorl.cli import convert as convert_cli
from megatron_brorl.cli import data as data_cli
from megatron_brorl.cli import evaluate as evaluate_cli
from megatron_brorl.cli import generate as generate_cli
from megatron_brorl.cli import report as report_cli
from megatron_brorl.cli import theory as theory_cli
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.files import check_outputs, read_object
from megatron_brorl.tracking import run_info
from megatron_brorl.tracking.progress import progress
from megatron_brorl.tracking.timeline import span

# Errors caused by disks, permissions and names of files. Any other OSError is a bug and is raised again.
_REFUSED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
# Files that `brorl train` writes at its end.
_FINAL_FILES = ("summary.json", "model/config.json", "curves.png")
_LENGTH_KEYS = {"train.steps", "train.max_seconds", "train.patience"}  # keys that decide whether a run is complete


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit.

    Exit codes: 0 for success, 75 for a run that was stopped and can be resumed, 2 for an error of the user or the disk,
    1 if another rank is gone. With 1 and 2, one line on stderr gives the reason. Any other exception is a bug.
    """
    try:
        args = _parse(arguments)
        status = _run_ranks(args) if hasattr(args, "processes") else args.command(args)
    except UserError as e:
        # An error is the same on all ranks of a node.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"brorl: {e}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # the reader, such as head or less, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        # Only this rank reports the error. The others report a lost connection.
        rank = os.environ.get("RANK", "0")
        place = f"{e.filename2 or e.filename}: " if e.filename else ""  # filename2 is the target of a copy
        print(f"brorl: rank {rank}: {place}{e.strerror}; fix that and run the same command again", file=sys.stderr)
        status = 2
    except RuntimeError as e:
        from megatron_brorl.parallel.network import lost_peer

        message = lost_peer(e)
        if not message:
            raise
        print(f"brorl: rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _run_ranks(args: argparse.Namespace) -> int:
    """Run a command of several ranks, as one of them or as their launcher."""
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes {args.processes}: must be at least 1")
    # Report errors of the configuration once, before any rank starts.
    config = load(args.config, args.overrides)
    check_outputs(config, args.name, args.config)

    if args.name == "train" and (message := finished(config)):
        if os.environ.get("RANK", "0") == "0":
            print(message)
        return 0

    if args.processes:
        from megatron_brorl.cli.launch import launch

        flags = ("dry-run", "accept-changed-functions")
        options = [f"--{flag}" for flag in flags if vars(args).get(flag.replace("-", "_"))]
        command = [sys.executable, "-m", "megatron_brorl", args.name, args.config, *options, *args.overrides]
        return launch(args.processes, command)

    # Install signal handlers first, because importing torch takes seconds.
    signals.install(saves=args.name == "train")
    with progress(total=0, title="start"), span("importing"):
        from megatron_brorl.cli import session  # noqa: F401
        from megatron_brorl.parallel import cpu_bridge

    cpu_bridge.order_kernels(config.parallel)
    cpu_bridge.disable_compiler()
    cpu_bridge.keep_freed_memory()
    status: int = args.command(args)
    return status


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse arguments, with options anywhere among the overrides, which argparse's subcommands do not support."""
    parser, commands = _parser()
    word = next(iter(sys.argv[1:] if arguments is None else arguments), "-")
    if not word.startswith("-") and word not in commands:
        likely = difflib.get_close_matches(word, commands) or commands
        raise UserError(f"no command is called {word!r}; did you mean {', '.join(likely)}?")
    args, rest = parser.parse_known_args(arguments)
    if not hasattr(args, "command") and not rest:
        parser.print_help()
        sys.exit(0)
    unknown = [argument for argument in rest if argument.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    if rest:
        args.overrides += rest
    if getattr(args, "benchmark", None):
        args.overrides.append(f"evaluate.benchmarks={json.dumps(args.benchmark)}")
    return args


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return the parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="brorl", description="Reinforcement learning with hundreds of rollouts per prompt, on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"brorl {__version__}")
    commands = parser.add_subparsers(metavar="command")
    overrides: Any = {"nargs": "*", "metavar": "section.key=value", "help": "override a value of the configuration"}

    # Commands that run on several ranks and take a configuration.
    for name, function, text in [
        ("train", _lazily("train", "run"), "train by reinforcement learning, with an evaluation before and after"),
        ("sft", _lazily("train", "run_sft"), "train on solved examples (supervised warm start)"),
        ("evaluate", evaluate_cli.evaluate, "measure pass@1 and pass@k of a model on held-out prompts or benchmarks"),
    ]:
        command = commands.add_parser(name, help=text, description=text)
        text = "number of ranks to start on this machine; omit it under torchrun or Slurm"
        command.add_argument("--processes", type=int, help=text)
        command.add_argument("config", help="TOML file")
        command.add_argument("overrides", **overrides)
        if name == "train":
            text = "check everything that the run needs, including a forward and backward pass, and write nothing"
            command.add_argument("--dry-run", action="store_true", help=text)
            text = "resume although files of your own functions have changed; run.json records both hashes of each"
            command.add_argument("--accept-changed-functions", action="store_true", help=text)
        if name == "evaluate":
            text = "JSONL, Parquet or CSV file with prompts (evaluate.benchmarks); may be given several times"
            command.add_argument("--benchmark", action="append", metavar="[NAME=]FILE", help=text)
        command.set_defaults(command=function, name=name)

    # Commands that run in one process.
    report_cli.add_commands(commands)  # brorl report, brorl rollouts
    evaluate_cli.add_compare(commands)  # brorl compare
    generate_cli.add_command(commands)  # brorl generate
    convert_cli.add_commands(commands)  # brorl convert, brorl quantize
    config_cli.add_commands(commands)  # brorl init, brorl config, brorl metrics
    data_cli.add_commands(commands)  # brorl data prepare, brorl data generate
    text = "check this machine, and plan the memory of a run; exit code 1 if no run could start"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.add_argument("config", nargs="?", help="TOML file of a run whose memory is planned")
    doctor.add_argument("overrides", **overrides)
    text = "number of ranks of the run (default: one per GPU of this machine)"
    doctor.add_argument("--ranks", type=int, default=0, help=text)
    doctor.add_argument("--ranks-per-node", type=int, default=0, help="ranks per node (default: at most 8)")
    text = "memory of a GPU of another machine, in GiB, to plan for it"
    doctor.add_argument("--gpu-gib", type=float, default=0, help=text)
    doctor.set_defaults(command=_lazily("preflight", "doctor"))
    theory_cli.add_commands(commands)  # brorl simulate, brorl pass-rates
    return parser, commands.choices


def _lazily(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """Return a function of a module of this package that imports the module when it is called."""

    def call(args: argparse.Namespace) -> int:
        status: int = getattr(importlib.import_module(f"megatron_brorl.cli.{module}"), function)(args)
        return status

    return call


def finished(config: Config) -> str:
    """Return one line for the user if run.dir has a finished run of this configuration, else "".

    Raises UserError with the keys that differ if it has a finished run of another configuration, unless one of the
    keys can make the run longer.
    """
    folder = Path(config.run.dir).absolute()
    recorded = run_info.read(folder).get("config")
    if not recorded or not all((folder / name).exists() for name in _FINAL_FILES):
        return ""

    # Compare as JSON, so that tuples equal lists, and without run.dir, because the folder may have been moved.
    requested = json.loads(json.dumps(dataclasses.asdict(config)))
    changes = {
        f"{section}.{key}": (recorded.get(section, {}).get(key), value)
        for section, values in requested.items()
        for key, value in values.items()
        if (section, key) != ("run", "dir") and recorded.get(section, {}).get(key) != value
    }
    if not changes.keys().isdisjoint(_LENGTH_KEYS):
        return ""
    steps = read_object(folder / "summary.json", "delete it to continue the run").get("steps")
    message = f"run.dir = {config.run.dir}: this run has finished (steps: {steps}; its model is {folder / 'model'})"
    if changes:
        from megatron_brorl.cli.run_folder import change_line  # imports torch

        raise UserError(
            f"{message} with other values: {change_line(changes)}; run.dir=OTHER starts a new run with them, and "
            "a higher train.steps continues this one"
        )
    return f"{message}; raise train.steps to continue it, or choose another run.dir"
