"""Compare log-probabilities and stop tokens with transformers for unusual model directories.

Transformers writes each directory, and the test edits its files. The built-in engine and the trainer then load it. The
expected values come from transformers' from_pretrained and generate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from megatron_brorl.api.engine import Engine, Sample
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.worker import StageOptions, Worker

VOCAB, EOS = 320, 1
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROMPTS = ["12 + 7 = ", " ".join(f"{i} + {i} = {2 * i}" for i in range(8))]
TOKENS, CLOSE = 40, 5e-5

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MISSING = object()
# Gemma's local layers have their own rotary embedding.
BOTH = {"full_attention": PLAIN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
Change = Callable[[Path, int, int], None]  # (directory, two ids that the model samples early)


def config(*without: str, **changes: Any) -> Change:
    """Set keys of config.json, and remove others."""

    def change(directory: Path, a: int, b: int) -> None:
        path = directory / "config.json"
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in raw.items() if key not in without}))

    return change


def rope(**changes: Any) -> Change:
    """Replace the rotary settings of config.json."""
    return config(*({"rope_parameters", "rope_scaling", "rope_theta"} - set(changes)), **changes)


def ends(choose: Callable[[int, int], tuple[Any, Any]]) -> Change:
    """Set eos_token_id of config.json and generation_config.json. A second value of None removes the latter file."""

    def change(directory: Path, a: int, b: int) -> None:
        first, second = choose(a, b)
        (config("eos_token_id") if first is MISSING else config(eos_token_id=first))(directory, a, b)
        path = directory / "generation_config.json"
        if second is None:
            path.unlink()
        else:
            path.write_text(json.dumps({"top_k": 5} if second is MISSING else {"eos_token_id": second, "top_k": 5}))

    return change


def shards_of_another_model(directory: Path, a: int, b: int) -> None:
    """Add index and shards of an older upload to the single file of a newer one."""
    other = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.save_pretrained(directory / "other", max_shard_size="100KB")
    for path in (directory / "other").glob("model*"):
        shutil.copy(path, directory)
    shutil.rmtree(directory / "other")
    assert (directory / INDEX).is_file()


def in_shards(directory: Path, a: int, b: int) -> None:
    """Split the weights into two files, with an index that has one wrong entry and lacks another."""
    tensors = tiny.weights(directory)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
    places = {name: file for file, part in parts.items() for name in part}
    places[names[0]] = places[names[1]]
    del places[names[2]]
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (directory / WEIGHTS).unlink()


def eos_is_an_added_token(directory: Path, a: int, b: int) -> None:
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
    "yarn over plain": ("llama", False, [rope(rope_scaling=YARN, rope_parameters=PLAIN)]),
    "linear over plain": ("qwen2", True, [rope(rope_scaling=LINEAR, rope_parameters=PLAIN)]),
    "llama3 over plain": ("llama", True, [rope(rope_scaling=LLAMA3, rope_parameters=PLAIN, rope_theta=777.0)]),
    "plain over yarn": ("qwen3", False, [rope(rope_scaling={"type": "default"}, rope_parameters=YARN)]),
    "yarn without its original context": ("qwen3", True, [rope(rope_parameters={"rope_type": "yarn", "factor": 4.0})]),
    "original context outside": ("llama", False, [rope(rope_scaling=LLAMA3, original_max_position_embeddings=128)]),
    "older keys": ("qwen2", True, [rope(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=777.0)]),
    "gemma with both": ("gemma3", True, [rope(rope_scaling=LINEAR, rope_parameters=BOTH)]),
    "gemma with a base outside": (
        "gemma3",
        False,
        [rope(rope_parameters={"full_attention": PLAIN}, rope_local_base_freq=300.0)],
    ),
    "gemma that does not say it is tied": ("gemma3", True, [config("tie_word_embeddings")]),
    "untied by default": ("qwen3", False, [config("tie_word_embeddings", "use_sliding_window", "layer_types")]),
    "stops in config.json": ("llama", True, [ends(lambda a, b: ([a, b], None))]),
    "stops in generation_config.json": ("qwen2", False, [ends(lambda a, b: (EOS, [a, b]))]),
    "stops in both": ("llama", False, [ends(lambda a, b: (a, b))]),
    "a generation config without stops": ("llama", True, [ends(lambda a, b: ([a, b], MISSING))]),
    "no stops": ("qwen3", True, [ends(lambda a, b: (MISSING, None))]),
    "a stale index": ("llama", False, [shards_of_another_model]),
    "shards and a wrong index": ("qwen3", False, [in_shards]),
    "added tokens": ("llama", True, [eos_is_an_added_token, ends(lambda a, b: ([a, b], None))]),
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


# Cases of `make test-fast`, one of each kind.
FAST = ("yarn over plain", "stops in config.json", "a stale index")
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MADE]


@pytest.fixture(params=NAMES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, tied, changes = MADE[request.param]
    model = tiny.make_model(tmp_path, family, tied, std=0.15, vocab_size=VOCAB, eos_token_id=EOS)
    write_tokenizer(tmp_path)
    ids = torch.tensor([load_tokenizer(tmp_path).encode_prompt(PROMPTS[0])])
    greedy = model.generate(ids, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None)[0, ids.shape[1] :]
    chosen = [token for token in dict.fromkeys(greedy.tolist()) if token > EOS]
    for change in changes:
        change(tmp_path, chosen[-1], chosen[len(chosen) // 2])
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
    rows, responses, ended = [], [], set()
    for prompt, group in zip(prompts, sampled, strict=True):
        for sample in group:
            response = torch.tensor(sample.token_ids)
            torch.testing.assert_close(
                torch.tensor(sample.log_probs), expected_log_probs(model, prompt, response), atol=CLOSE, rtol=0
            )
            assert [i for i, token in enumerate(sample.token_ids) if token in stops] == (
                [len(response) - 1] if sample.finish == "stop" else []
            )
            assert sample.finish == "stop" or len(response) == TOKENS
            ended |= {sample.token_ids[-1]} & stops
            rows.append(prompt)
            responses.append(response)
    assert ended  # otherwise stop tokens were not tested

    # Log-probabilities of the trainer for the same responses.
    ops = backend("fused", torch.device("cpu"))
    worker = Worker(read_shape(directory), processes, StageOptions(400, ops, torch.float32), None)
    worker.load_hf(str(directory))
    for prompt, response, found in zip(rows, responses, worker.log_probs(rows, responses, 1.0), strict=True):
        torch.testing.assert_close(found, expected_log_probs(model, prompt, response), atol=CLOSE, rtol=0)

    # generate() stops at the same token.
    for prompt, (sample,) in zip(prompts, greedy, strict=True):
        found = model.generate(
            prompt[None], do_sample=False, max_new_tokens=TOKENS, attention_mask=torch.ones_like(prompt)[None]
        )
        assert list(sample.token_ids) == found[0, len(prompt) :].tolist()
