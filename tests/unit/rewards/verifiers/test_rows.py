"""Rows that a verifier cannot use are refused with their place and what to change."""

import pytest
from rows import row

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry

ADD = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}]}
SUM = {"question": "1 + 2", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
CODE = {"question": "?", "answer": "0x1", "metadata": {"problem": "__import__('os').getcwd()"}}
NO_COMMA, WORDS, NTH = "punctuation:no_comma", "length_constraints:number_words", "nth_paragraph"
RULES = {"instruction_id_list": [NO_COMMA], "kwargs": [{}]}
INSTRUCTIONS = [
    (f"{NO_COMMA}s", {}, f"'{NO_COMMA}s'; did you mean {NO_COMMA}"),
    (NO_COMMA, None, rf"kwargs\[0\] \({NO_COMMA}\) is None; use an object"),
    (NO_COMMA, {"n": 1}, "has 'n', .*; remove it"),
    ("keywords:existence", {}, "lacks 'keywords', a list of strings; add it"),
    ("keywords:existence", {"keywords": ["a", " "]}, "must be a list of strings"),
    (WORDS, {"num_words": 3, "relation": "more"}, '"at least" or "less than"'),
    (WORDS, {"num_words": True, "relation": "at least"}, "num_words = True"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, "num_paragraphs = 0"),
    ("language:response_language", {"language": "zh"}, "language = 'zh'; it must be one of af ar bg "),
    (f"length_constraints:{NTH}_first_word", {"num_paragraphs": 2, NTH: 3, "first_word": "a"}, f"{NTH} above num_para"),
]
REFUSED = {
    "exact": [(row(), 'reference; add "answer"')],
    "math": [(row(reference), "answer") for reference in (None, "  ", r"\boxed{1} or \boxed{2}")],
    "choice": [
        (row(), "answer"),
        (row("A or B"), "'A or B'"),
        (row("D", choices=["x", "y"]), "has 2 options"),
        (row("A", choices="xy"), "metadata.choices must be a list"),
        (row("A", choices=["x"]), "2 to 10"),
    ],
    "short_answer": [
        (row(), "answer"),
        (row("?!"), "neither letters nor digits"),
        (row("x", answers="y"), "metadata.answers must be a list"),
        (row("1", tolerance=1), "metadata.tolerance .*relative error"),
        (row("1", tolerance=True), "metadata.tolerance .*relative error"),
    ],
    "format": [
        (row(format_tags=tags), r"metadata\.format_tags = .*a list of different names")
        for tags in ("think", [], ["a", "a"], [1], ["a b"], None)
    ],
    "code": [
        (row(), "metadata.tests"),
        (row(tests=[{"input": "1"}]), r"metadata.tests\[0\]: needs input and output"),
        (row(function="f", tests=[{"args": 1, "expected": 2}]), "args as a list"),
        (row(function="f", tests=[{"args": [{"!": "os", "v": 1}], "expected": 2}]), "no value has the form"),
        (row(asserts=["assert f()"]), "metadata.function"),
        (row(function="f", asserts=["f()"]), "has no assert"),
        (row(function="f", asserts=["assert f("]), "is not Python"),
        (row(function="f", asserts=["assert f()"], tests=[]), "both tests and asserts"),
        (row(function="f", asserts=[]), "metadata.asserts is empty"),
        (row(**ADD, prelude="import"), "metadata.prelude is not Python"),
        (row(function="f", asserts=["assert f()"], setup=1), "metadata.setup: must be Python code as text, not int"),
        (row(**ADD, language="cobol"), "'cobol'"),
        (row(**ADD, tolerance=-1), "metadata.tolerance = -1"),
    ],
    "reasoning_gym": [
        (row(), "metadata.source_dataset"),
        (row(source_dataset=3, entry=SUM), "metadata.source_dataset"),
        (row(source_dataset="puzzle24", entry=SUM), "'puzzle24' is refused: its scorer"),
        (row(source_dataset="chain_sums", entry=SUM), "'chain_sums'; did you mean .*chain_sum"),
        (row(source_dataset="chain_sum"), "metadata.entry"),
        (row(source_dataset="chain_sum", entry={"answer": "1"}), "metadata.entry"),
        (row(source_dataset="gcd", entry=SUM), "'gcd', but the entry is of 'chain_sum'"),
        (row(source_dataset="chain_sum", entry=SUM, config=[]), "metadata.config must be an object"),
        (row(source_dataset="bitwise_arithmetic", entry=CODE), "metadata.entry.metadata.problem = "),
    ],
    "ifeval": [
        *((row(instruction_id_list=[kind], kwargs=[kwargs]), message) for kind, kwargs, message in INSTRUCTIONS),
        (row(), "metadata.instruction_id_list"),
        (row(instruction_id_list=[NO_COMMA]), "metadata.kwargs, a list of 1 objects"),
        (row(instruction_id_list=[NO_COMMA] * 17), "at most 16"),
        (row(**RULES, mode="lose"), "metadata.mode is 'lose'"),
        (row(**RULES, all=1), "metadata.all is 1"),
        (row(**RULES, min_words=-1), "metadata.min_words is -1"),
    ],
}
USABLE = {
    "choice": row("(b)", choices=["London", "Paris", "a dog", "12 m"]),
    "short_answer": row("9.81 m/s^2", answers=["g"], tolerance=0.01),
    "format": row(format_tags=["plan", "step-2"]),
    "code": row(**ADD, prelude="import math", tolerance=1e-3),
    "reasoning_gym": row(source_dataset="chain_sum", entry=SUM),
    "ifeval": row(**RULES, mode="loose", all=True, min_words=2),
}


@pytest.mark.parametrize(
    ("verifier", "refused_row", "message"), [(v, *case) for v, cases in REFUSED.items() for case in cases]
)
def test_unusable_rows_are_refused(verifier, refused_row, message):
    with pytest.raises(UserError, match=rf"^f\.jsonl:1: [^\n]*{message}[^\n]*$"):
        registry.entry(verifier, "verifier").check_row(refused_row, "f.jsonl:1")


@pytest.mark.parametrize("verifier", USABLE)
def test_usable_rows_are_accepted(verifier):
    registry.entry(verifier, "verifier").check_row(USABLE[verifier], "f.jsonl:1")
