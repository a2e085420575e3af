"""The sciences: SCP-116K with free answers, GPQA with four choices."""

from __future__ import annotations

import hashlib

from megatron_brorl.data.sets.form import Raw, Task, Unusable, plain, text

LONGEST_ANSWER = 120  # characters; a longer one is a derivation, which no comparison of answers can judge
LETTERS = "ABCD"


def scp116k(raw: Raw, where: str) -> Task:
    """problem, and the extracted solution, of which only the short ones can be compared."""
    answer = plain(raw, where, "answer", "extract_solution", "solution")
    if not answer:
        raise Unusable("no answer")
    if len(answer) > LONGEST_ANSWER:
        raise Unusable(f"answer longer than {LONGEST_ANSWER} characters")
    return Task(text(raw, where, "problem").strip(), answer, "short_answer")


def gpqa(raw: Raw, where: str) -> Task:
    """Question, Correct Answer, Incorrect Answer 1 to 3; the choices stand in an order that the question decides."""
    question = text(raw, where, "Question").strip()
    names = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    choices = [text(raw, where, name).strip() for name in names]
    if len(set(choices)) < len(choices):
        raise Unusable("two choices are the same")

    # By a key of each choice, so that no position is right more often than another, on any machine.
    ordered = sorted(choices, key=lambda choice: hashlib.blake2b(f"{question}\0{choice}".encode()).digest())
    shown = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, ordered, strict=True))
    answer = LETTERS[ordered.index(choices[0])]
    return Task(f"{question}\n\n{shown}", answer, "choice", {"choices": ordered}, str(raw.get("Record ID") or ""))
