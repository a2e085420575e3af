"""Examples for supervised training: a prompt, and its target or its reference answer as the response."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.types import Prompt


def sft_examples(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Return the prompt ids and the response ids of each prompt. A response ends with the EOS token."""
    examples = []
    for prompt in prompts:
        target = prompt.answer if prompt.target is None else prompt.target
        if target is None:
            raise UserError(
                f"prompt {prompt.id!r} has neither target nor reference answer, so there is nothing to imitate; "
                "remove its task or row from supervised training"
            )
        examples.append((list(prompt.token_ids), [*tokenizer.encode(target), tokenizer.eos_id]))
    return examples
