"""What a response as a whole is like: where it begins and ends, and what it is put together from."""

from __future__ import annotations

_SEPARATOR = "******"


def no_comma(response: str) -> bool:
    """Not one comma."""
    return "," not in response


def quotation(response: str) -> bool:
    """In double quotes from the first to the last character."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def end_checker(response: str, end_phrase: str) -> bool:
    """Ends with the phrase, capitals and quotes around it aside."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    """Begins with the prompt, capitals aside."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def two_responses(response: str) -> bool:
    """Two that differ with six asterisks between them; nothing else, but asterisks may also open and close."""
    first, *others = [part.strip() for part in response.split(_SEPARATOR)]
    inner, last = others[:-1], others[-1:]
    if not all(inner):
        return False
    found = [part for part in (first, *inner, *last) if part]
    return len(found) == 2 and found[0] != found[1]
