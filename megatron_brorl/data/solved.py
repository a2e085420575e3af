"""Worked examples for a supervised warm start: the prompt, and its reference answer as the response."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.types import Prompt


def solved_examples(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each prompt; the response ends with the end-of-sequence token."""
    examples = []
    for prompt in prompts:
        if prompt.answer is None:
            raise UserError(
                f"prompt {prompt.id!r} has no reference answer, so there is nothing to imitate; "
                "leave its task or row out of supervised training"
            )
        examples.append((list(prompt.token_ids), [*tokenizer.encode(prompt.answer), tokenizer.eos_id]))
    return examples
