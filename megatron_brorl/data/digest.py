"""What a run was fed, as hashes: a run that is resumed with another tokenizer or other rows is another run."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from megatron_brorl.data.source import Sources
from megatron_brorl.data.stop_ids import transformers_stop_ids
from megatron_brorl.types import Prompt

TEMPLATE_DATE = "template_date"
# Whatever of a directory decides how a text becomes tokens.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def of_inputs(directory: Path, sources: Sources, date: datetime.date | None) -> dict[str, str]:
    """Return the sha256 of tokenizer files and rows by name, and the date that the chat template writes, if it does."""
    # The date comes first: a resumed run is told about it, and not about the rows that it changes.
    return {
        **({} if date is None else {TEMPLATE_DATE: str(date)}),
        "tokenizer": of_tokenizer(directory),
        "train": of_prompts(sources.first()),
        "held_out": of_prompts(sources.held_out),
    }


def of_tokenizer(directory: Path) -> str:
    """Return the SHA-256 of a directory's tokenizer files, by name and content, and of the ids that end a response."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = directory / name
        if path.is_file():
            digest.update(f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()};".encode())
    digest.update(f"stop:{sorted(transformers_stop_ids(directory))}".encode())  # config.json may name them too
    return digest.hexdigest()


def of_prompts(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of prompts in their order: ids, tokens, and what they are judged by."""
    digest = hashlib.sha256()
    for p in prompts:
        metadata = json.dumps(p.metadata, sort_keys=True, default=str)
        digest.update(repr((p.id, p.token_ids, p.answer, p.verifier, metadata)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
