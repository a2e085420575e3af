"""Compare log-probabilities and stop tokens with transformers for unusual model directories.

Transformers writes each directory, and the test edits its files. The built-in engine and the trainer then load it. The
expected values come from transformers' from_pretrained and generate. test_shape.py,
test_stop_ids.py and test_hugging_face.py compare more forms of the same files with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from megatron_brorl.api.engine import Engine, Sample
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.worker import StageOptions, Worker

VOCAB, EOS = 320, 1
PROMPTS = ["12 + 7 = ", " ".join(f"{i} + {i} = {2 * i}" for i in range(8))]
TOKENS, CLOSE = 40, 5e-5

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
# Gemma's local layers have their own rotary embedding.
BOTH = {"full_attention": PLAIN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
Change = Callable[[Path, list[int]], None]  # (directory, two ids that the model samples early)


def rope(**changes: Any) -> Change:
    """Replace the rotary settings of config.json."""

    def change(directory: Path, ids: list[int]) -> None:
        raw = json.loads((directory / "config.json").read_text())
        kept = {key: value for key, value in raw.items() if not key.startswith("rope_")}
        (directory / "config.json").write_text(json.dumps(kept | changes))

    return change


def stops_in_generation_config(directory: Path, ids: list[int]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "top_k": 5}))


def stops_in_config(directory: Path, ids: list[int]) -> None:
    (directory / "generation_config.json").unlink()
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"eos_token_id": ids}))


def eos_is_an_added_token(directory: Path, ids: list[int]) -> None:
    """Add tokens beyond the vocabulary of the tokenizer, for which the model has rows."""
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.add_special_tokens(["<|turn|>", "<|end|>"])
    inner.add_tokens(["added"])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(directory).eos_id >= inner.get_vocab_size(with_added_tokens=False)


# Family, whether the embeddings are tied, and the changes to the directory.
MADE: dict[str, tuple[str, bool, list[Change]]] = {
    "yarn without its original context": ("qwen3", True, [rope(rope_parameters={"rope_type": "yarn", "factor": 4.0})]),
    "stops in generation_config.json": ("qwen2", False, [stops_in_generation_config]),
    "gemma with both": ("gemma3", True, [rope(rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters=BOTH)]),
    "added tokens": ("llama", True, [eos_is_an_added_token, stops_in_config]),
}


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE. Ids 0 and 1 are <s> and </s>."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(PROMPTS, trainer)
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(params=MADE)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, tied, changes = MADE[request.param]
    model = tiny.make_model(tmp_path, family, tied, std=0.15, vocab_size=VOCAB, eos_token_id=EOS)
    write_tokenizer(tmp_path)
    ids = torch.tensor([load_tokenizer(tmp_path).encode_prompt(PROMPTS[0])])
    greedy = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None)[0, ids.shape[1] :]
    chosen = [token for token in dict.fromkeys(greedy.tolist()) if token > EOS]
    for change in changes:
        change(tmp_path, [chosen[-1], chosen[len(chosen) // 2]])
    return tmp_path


def expected_log_probs(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)


def test_log_probs_and_stop_tokens_are_those_of_transformers(directory: Path, processes: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = load_tokenizer(directory)
    prompts = [torch.tensor(tokenizer.encode_prompt(text)) for text in PROMPTS]
    given = model.generation_config.eos_token_id
    stops = {tokenizer.eos_id, *([] if given is None else given if isinstance(given, list) else [given])}

    # Log-probabilities and stop tokens of the built-in engine.
    with Engine.from_pretrained(directory) as engine:
        sampled: list[list[Sample]] = engine.sample(PROMPTS, 24, max_tokens=TOKENS, seed=1)
        greedy: list[list[Sample]] = engine.sample(PROMPTS, 1, max_tokens=TOKENS, temperature=0)
    pairs = [(prompt, sample) for prompt, group in zip(prompts, sampled, strict=True) for sample in group]
    responses = [torch.tensor(sample.token_ids) for _, sample in pairs]
    expected = [expected_log_probs(model, prompt, ids) for (prompt, _), ids in zip(pairs, responses, strict=True)]
    for (_, sample), log_probs in zip(pairs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(sample.log_probs), log_probs, atol=CLOSE, rtol=0)
        ends = [i for i, token in enumerate(sample.token_ids) if token in stops]
        assert ends == ([len(sample.token_ids) - 1] if sample.finish == "stop" else [])
        assert sample.finish == "stop" or len(sample.token_ids) == TOKENS
    assert any(sample.finish == "stop" for _, sample in pairs)  # otherwise stop tokens were not tested

    # Log-probabilities of the trainer for the same responses.
    ops = backend("fused", torch.device("cpu"))
    worker = Worker(read_shape(directory), processes, StageOptions(400, ops, torch.float32), None)
    worker.load_hf(str(directory))
    of_trainer = worker.log_probs([prompt for prompt, _ in pairs], responses, 1.0)
    torch.testing.assert_close(list(of_trainer), expected, atol=CLOSE, rtol=0)

    # generate() stops at the same token.
    for prompt, (sample,) in zip(prompts, greedy, strict=True):
        mask = torch.ones_like(prompt)[None]
        ids = model.generate(prompt[None], do_sample=False, max_new_tokens=TOKENS, attention_mask=mask)
        assert list(sample.token_ids) == ids[0, len(prompt) :].tolist()
