"""Agents on the real vLLM."""

from __future__ import annotations

from unit.agents.test_agent_rollouts import TEMPLATE, agents, branches, check_log_probs
from unit.data.test_tokenizers import make_hf
from vllm_engines import Model

from megatron_brorl.data.tokenizers import load_tokenizer


def test_branches_limits_and_stop_strings(start, tmp_path):
    """Calls have limits and stop strings of their own, and their log-probabilities are those of transformers."""
    model = Model(tmp_path / "model", "qwen2", tied=True, vocab_size=304, bos_token_id=0, eos_token_id=1)
    decode = load_tokenizer(make_hf(model.directory, chat_template=TEMPLATE)).decode_all
    options = {"agents": True, "context": 256, "stop_ids": (1,), "max_rows": 64}
    engine = start(model, options=options, decode=decode)
    engine.update_weights(model.stream(), version=0)
    with agents((model.directory, model.module), branches, inner=engine) as run:
        rollouts = run()
    check_log_probs((model.directory, model.module), rollouts)
    assert [(len(r.episode.starts), r.episode.turns) for r in rollouts] == [(3, 6)] * 8
