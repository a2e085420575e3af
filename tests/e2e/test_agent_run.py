"""Runs with an agent: random delays and a restart change no bit."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
from e2e.runs import brorl, metric_lines, rewind
from unit.agents.test_agent_rollouts import TEMPLATE
from unit.data.test_tokenizers import make_hf

AGENT = '''
import asyncio, random

async def solve(row, client, model):
    """Ask for a number, ask two others for a comment at the same time, and return the share of right digits."""
    async def ask(*messages):
        await asyncio.sleep(random.random() / 20)
        messages = [{"role": role, "content": text} for role, text in messages]
        reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
        return reply.choices[0].message.content

    question = ("user", row["prompt"])
    first = await ask(question)
    await asyncio.gather(*(ask(question, ("assistant", first), ("user", text)) for text in ("yes?", "no?")))
    if len(first) % 3 == 0:
        await ask(("system", "judge"), ("user", first))
    if len(first) % 3 == 1:
        return first
    return sum(c in "0123456789" for c in first) / 8
'''
TOML = """
model.path = "{0}/model"
agent = {{ function = "{0}/agent.py:solve", max_calls = 4 }}
data = {{ train = ["{0}/rows.jsonl"], held_out = ["{0}/held_out.jsonl"], chat = true }}
rollout = {{ n = 6, prompts = 2, max_tokens = 8 }}
reward.workers = 1
algo = {{ mini_batches = 2, aggregation = "sequence_mean" }}
optim.lr = 1e-3
train = {{ steps = 2, checkpoint_every = 1, tokens_per_micro_batch = 600 }}
evaluate.samples = 2
run.log = []
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    tiny.make_model(folder / "model", "qwen2", tied=True, vocab_size=304, bos_token_id=0, eos_token_id=1)
    make_hf(folder / "model", chat_template=TEMPLATE)
    data = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(3)]
    for name, data_rows in (("held_out", data[:2]), ("rows", data[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data_rows))
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.toml").write_text(TOML.format(folder))
    return folder / "run.toml"


def test_runs_are_equal_with_delays_and_a_restart(config, tmp_path):
    command = ["train", "--processes", "2", config]
    undisturbed, restarted = tmp_path / "undisturbed", tmp_path / "restarted"
    result = brorl(*command, f"run.dir={undisturbed}")
    assert result.returncode == 0, result.stderr
    shutil.copytree(undisturbed, restarted)
    rewind(restarted, step=1)
    result = brorl(*command, f"run.dir={restarted}")
    assert "resumed from" in result.stderr, result.stderr
    lines = metric_lines(undisturbed)
    assert metric_lines(restarted) == lines
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (undisturbed, restarted)]
    evaluations = [json.loads((run / "summary.json").read_text())["after"] for run in (undisturbed, restarted)]
    assert weights[0] == weights[1]
    assert evaluations[0] == evaluations[1]
    assert all(line["sequences_per_rollout"] > 2 for line in lines)
    assert sum(line["updates"] for line in lines) > 0


def test_a_dry_run_tries_the_agent(config, tmp_path):
    result = brorl("train", "--dry-run", config, f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "agent run" in line]
    assert "3 calls" in line
    assert "verifier exact scores '0'" in line
