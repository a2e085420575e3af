"""The tokens that end a response, as the files of a model name them."""

from __future__ import annotations

from pathlib import Path

from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError, shown
from megatron_brorl.json_files import read_object
from megatron_brorl.model_shape import CONFIG

GENERATION = "generation_config.json"


def stop_ids(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a response: those at which transformers' generate() stops, and the tokenizer's EOS.

    The tokenizer's EOS is always one of them, because supervised training ends its targets with it. Raises UserError
    where a file names something else than ids.
    """
    return tuple(sorted({tokenizer.eos_id, *transformers_stop_ids(directory)}))


def transformers_stop_ids(directory: Path) -> frozenset[int]:
    """Return eos_token_id of generation_config.json, or of config.json in a directory without that file.

    A generation_config.json that lacks the key, or has null, hides the one of config.json. Raises UserError as above.
    """
    path = next((directory / name for name in (GENERATION, CONFIG) if (directory / name).is_file()), None)
    given = read_object(path).get("eos_token_id") if path else None
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(token) is not int or token < 0 for token in listed):
        raise UserError(f"{path}: eos_token_id = {shown(given)}: must be a token's id, or a list of them")
    return frozenset(listed)
