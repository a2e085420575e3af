"""`brorl sft`: supervised training on solved examples, a warm start for reinforcement learning."""

from __future__ import annotations

import argparse
import time

from megatron_brorl.cli.session import Session
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import SFT_STREAM
from megatron_brorl.tracking.progress import progress
from megatron_brorl.train.sft import sft, sft_optim


def run(args: argparse.Namespace) -> int:
    """Train by a configuration file, see `execute`."""
    return execute(load(args.config, args.overrides))


def execute(config: Config) -> int:
    """Train on the reference answers of the training prompts, and write run.dir/model. Returns 0."""
    began = time.time()
    optim = sft_optim(config.sft, config.optim)
    with progress(config.sft.steps, "sft") as p, Session(config, stream=SFT_STREAM) as session:
        worker = session.worker(optim)
        writer = session.writer(resume_step=None)
        p.begin(config.sft.steps)
        p.note(session.report)
        sft(worker, session.sources.train, session.tokenizer, config.sft, optim, writer, p)
        sizes = {"optimizer steps": config.sft.steps, "examples per step": config.sft.examples_per_step}
        session.export(worker, session.card("supervised training on solved examples", "sft", sizes, began))
    return 0
