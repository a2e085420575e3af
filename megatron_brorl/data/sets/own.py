"""Files that are no published set: the project's own rows, and any columns that the user names."""

from __future__ import annotations

from megatron_brorl.data.columns import compiled, last_match
from megatron_brorl.data.sets.form import Raw, Task, Unusable, plain, text
from megatron_brorl.errors import UserError


def rows(raw: Raw, where: str) -> Task:
    """The project's own rows (data/prompts.py)."""
    unknown = {key for key, value in raw.items() if value is not None} - {
        "prompt",
        "answer",
        "verifier",
        "id",
        "metadata",
    }
    if unknown:
        raise UserError(f"{where}: unknown key {min(unknown)!r} in a row; name the set, or 'custom' with --prompt")
    metadata, answer = raw.get("metadata") or {}, raw.get("answer")
    if not isinstance(metadata, dict) or not (answer is None or isinstance(answer, str)):
        raise UserError(f"{where}: answer must be text or null, metadata an object")

    # A conversation is looked at by what is said in it.
    prompt = raw.get("prompt")
    messages = prompt if isinstance(prompt, list) else None
    problem = "\n".join(text(m, where, "content") for m in messages) if messages else text(raw, where, "prompt")
    return Task(problem, answer, raw.get("verifier") or "", metadata, raw.get("id") or "", messages)


class Custom:
    """A mapping by names of columns."""

    def __init__(self, prompt: str, answer: str, answer_regex: str) -> None:
        """answer: "" = the rows have none. answer_regex: its first group, or all of it, is the answer; "" = any."""
        self._prompt, self._answer = prompt, answer
        self._regex = compiled(answer_regex, "--answer-regex") if answer_regex else None

    def __call__(self, raw: Raw, where: str) -> Task:
        problem = text(raw, where, self._prompt).strip()
        answer = plain(raw, where, self._answer) if self._answer else None

        if self._regex and answer is not None:
            answer = last_match(self._regex, answer)
            if answer is None:
                raise Unusable("answer without a match of --answer-regex")
        if answer == "" or not problem:
            raise Unusable("no problem or no answer")
        return Task(problem, answer, "")
