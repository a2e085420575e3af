"""Compare the tokens that end a response with the generation configuration of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoModelForCausalLM, GenerationConfig

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.data.sentencepiece import train_sentencepiece
from megatron_brorl.data.tokenizers import load_tokenizer, stop_ids
from megatron_brorl.errors import UserError

EOS = 2  # of the tokenizer
ABSENT = object()

# (eos_token_id of config.json, content of generation_config.json, ids at which transformers stops).
CASES: dict[str, tuple[Any, dict[str, Any] | None, set[int]]] = {
    "an id": (40, None, {40}),
    "a list": ([40, 42], None, {40, 42}),
    "null": (None, None, set()),
    "missing": (ABSENT, None, set()),
    "both files, lists": ([40, 42], {"eos_token_id": [EOS, 41]}, {EOS, 41}),
    "a generation config without the key": ([40, 42], {"temperature": 0.5}, set()),
    "a generation config with null": ([40, 42], {"eos_token_id": None, "top_k": 5}, set()),
    "a generation config alone": (ABSENT, {"eos_token_id": [41, 40]}, {40, 41}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    tiny.make_model(directory, "llama", True)
    train_sentencepiece(["abc", "1+1=2"] * 20, directory, 60)
    return directory


def arrange(made: Path, config: Any, generation: dict[str, Any] | None) -> None:
    raw = json.loads((made / "config.json").read_text())
    raw.pop("eos_token_id", None)
    (made / "config.json").write_text(json.dumps(raw if config is ABSENT else {**raw, "eos_token_id": config}))
    (made / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (made / "generation_config.json").write_text(json.dumps(generation))


def resolved(directory: Path) -> set[int]:
    """Return the stop ids of transformers' generate()."""
    ids = AutoModelForCausalLM.from_pretrained(directory).generation_config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


@pytest.mark.parametrize("name", CASES)
def test_stop_ids_are_those_of_transformers_and_eos(made: Path, tmp_path: Path, name: str) -> None:
    config, generation, expected = CASES[name]
    arrange(made, config, generation)
    tokenizer = load_tokenizer(made)
    assert tokenizer.eos_id == EOS
    assert resolved(made) == expected
    assert set(stop_ids(made, tokenizer)) == expected | {EOS}

    # transformers stops at the same tokens in an export. Other generation settings are kept.
    hugging_face.save(tiny.weights(made).items(), made, tmp_path / "out", "float32")
    assert resolved(tmp_path / "out") == expected | {EOS}
    kept = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    for key, value in (generation or {}).items():
        assert key == "eos_token_id" or kept[key] == value
    assert (kept["bos_token_id"], kept["pad_token_id"]) == ((1, 3) if generation is None else (None, None))
    assert set(stop_ids(tmp_path / "out", tokenizer)) == expected | {EOS}


@pytest.mark.parametrize("given", ["2", True, [2, "3"], -1])
def test_values_that_are_no_ids_are_refused(made: Path, given: object) -> None:
    for file, generation in (("config.json", None), ("generation_config.json", {"eos_token_id": given})):
        arrange(made, given, generation)
        with pytest.raises(UserError, match=rf"^{made / file}: eos_token_id = "):
            stop_ids(made, load_tokenizer(made))
