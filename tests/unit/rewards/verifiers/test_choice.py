import itertools

import pytest
from rows import row

from megatron_brorl.rewards.verifiers.choice import find, verify

NOTATIONS = ["{}", "({})", "{}.", "{})", "**{}**", r"\boxed{{{}}}", r"\boxed{{\text{{({})}}}}", "Answer: {}", "[{}]",
             "The answer is ({}).", "The answer is **{}**.", "Option {}", "<answer>{}</answer>", "${}$",
             "The correct answer is {} because B and C fail."]  # fmt: skip
CHOICES = ["London", "Paris", "a dog", "12 m"]


def reward(response, task):
    answer = find(response)
    return 0.0 if answer is None else verify(answer, task).reward


@pytest.mark.parametrize("notation", NOTATIONS)
def test_letters_are_read_in_any_notation(notation):
    for choice, right in itertools.product("ABCDJ", repeat=2):
        assert reward(notation.format(choice), row(right)) == (choice == right)
        assert reward(notation.format(choice), row(f"({right.lower()})")) == (choice == right)


def test_small_letters_count_in_brackets_or_on_their_own():
    assert reward("The answer is (b).", row("B")) == reward("b", row("B")) == 1
    assert reward("a dog", row("A")) == 0


@pytest.mark.parametrize(
    "response",
    ["B or C", "A, B, C, D", "(A)(B)(C)(D)", r"\boxed{A} \boxed{B}", "The answer is B, not C", "A/B", "A B", "BA",
     "I like B", "Banana", "", "K", "The answer is A dog", "B" * 5000, "The answer is A. The answer is B."],
)  # fmt: skip
def test_several_letters_or_none_are_not_an_answer(response):
    for right in "ABCD":
        assert reward(response, row(right)) == 0


def test_text_of_an_option_counts_as_its_letter():
    task = row("B", choices=CHOICES)
    assert reward("The answer is Paris.", task) == reward(r"\boxed{B. Paris}", task) == reward("paris", task) == 1
    assert reward("London", task) == reward("The answer is Rome.", task) == 0
    assert verify("B. London", task).reason == "no answer: no single option in B. London"
    assert reward(r"\boxed{12\text{ m}}", row("D", choices=CHOICES)) == 1
    assert verify("A", task).reason == "A is not B"
