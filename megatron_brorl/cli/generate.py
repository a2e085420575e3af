"""`brorl generate`: sample responses of a model to a prompt, with the built-in engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_brorl.config.load import load_table
from megatron_brorl.config.schema import Config, DataConfig, RolloutConfig
from megatron_brorl.data.chat import has_chat_template
from megatron_brorl.data.hub import model_directory
from megatron_brorl.errors import UserError
from megatron_brorl.rollout_log import printable
from megatron_brorl.tracking import run_info

_MAX_TOKENS = 256


def add_command(commands: Any) -> None:
    text = "sample responses of a model to a prompt"
    command = commands.add_parser("generate", help=text, description=text)
    text = (
        "run.dir of a training run, whose template, stop strings and sampling are used; or a Hugging Face directory, "
        "or a name on the hub"
    )
    command.add_argument("model", metavar="RUN_OR_MODEL", help=text)
    command.add_argument("prompt", metavar="PROMPT")
    command.add_argument("-n", type=int, default=1, help="number of responses (%(default)s)")
    text = (
        "maximum tokens of a response (default: rollout.max_tokens of the run; for a model "
        f"{_MAX_TOKENS}, or half of its context if that is less)"
    )
    command.add_argument("--max-tokens", type=int, help=text)
    text = "0 is greedy decoding (default: rollout.temperature of the run; 1.0 for a model)"
    command.add_argument("--temperature", type=float, help=text)
    command.add_argument("--seed", type=int, default=0, help="seed of the random numbers (%(default)s)")
    text = "pass the prompt as it is, without the model's chat template and the template of the run"
    command.add_argument("--raw", action="store_true", help=text)
    command.set_defaults(command=_generate)


def _generate(args: argparse.Namespace) -> int:
    from megatron_brorl.parallel import cpu_bridge

    cpu_bridge.disable_compiler()
    from megatron_brorl.api.engine import Engine
    from megatron_brorl.cli.run_folder import template_date
    from megatron_brorl.data.prompts import render
    from megatron_brorl.data.tokenizers import load_tokenizer
    from megatron_brorl.families.shape import read_shape

    run = Path(args.model)
    if (run / run_info.FILE).is_file():
        config = _run_config(run)
        directory = run / "model"
        shape = read_shape(directory, "a run writes its model at its end")
        note = f"template, stop strings and sampling are those of {run / run_info.FILE}; --raw leaves the template out"
    else:
        directory = model_directory(args.model, "RUN_OR_MODEL")
        shape = read_shape(directory, "RUN_OR_MODEL")
        chat = has_chat_template(directory)
        rollout = RolloutConfig(max_tokens=min(_MAX_TOKENS, shape.context // 2))
        config = Config(data=DataConfig(chat=chat), rollout=rollout)
        note = "the prompt is a user message in the model's chat template; --raw leaves it out" if chat else ""
    if note and not args.raw:
        print(note, file=sys.stderr)

    data = DataConfig() if args.raw else config.data
    _, ids = render(args.prompt, load_tokenizer(directory, template_date(run)), data, shape.context, "PROMPT")
    with Engine.from_pretrained(directory, dtype=config.rollout.dtype) as engine:
        [samples] = engine.sample(
            [ids],
            args.n,
            max_tokens=config.rollout.max_tokens if args.max_tokens is None else args.max_tokens,
            temperature=config.rollout.temperature if args.temperature is None else args.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop=config.stop_strings,
            seed=args.seed,
        )
    for i, sample in enumerate(samples):
        ended = "cut off" if sample.finish == "length" else "ended by itself"
        print(f"--- {i}, {len(sample.token_ids)} tokens, {ended}\n{printable(sample.text)}")
    return 0


def _run_config(run: Path) -> Config:
    """Return the configuration of a run. Raises UserError if its prompts cannot be sampled outside of it."""
    path = run / run_info.FILE
    table = run_info.read(run).get("config")
    if not table:
        raise UserError(f"{path}: holds no configuration of a run; give run.dir of a run, or a model directory")
    config = load_table(table, str(path))
    if config.environment.factory:
        raise UserError(
            f"{path}: environment.factory = {config.environment.factory!r}: this command samples without an "
            f"environment; `brorl rollouts {run}` shows rollouts, and {run / 'model'} is sampled as a plain model"
        )
    return config
