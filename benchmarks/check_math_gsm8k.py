r"""Verifier `math` on GSM8K's solutions: how many score 1, how many do with a wrong number, false negatives by form.

    python benchmarks/check_math_gsm8k.py test.jsonl

The file is the one of openai/grade-school-math, a line {"question", "answer"} each. Every form writes the reference's
number differently and is scored by verifier `math` and by math-verify on the same text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import math_verify

from megatron_brorl.rewards.extract import given_answer
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.verifiers import math as math_verifier

# The text of an integer in each form; None if the form cannot write it.
FORMS: dict[str, Callable[[int], str | None]] = {
    "bare": str,
    r"\boxed{}": lambda n: rf"So it is \boxed{{{n}}}.",
    "#### N": lambda n: f"Add them up.\n#### {n}",
    "The answer is N.": lambda n: f"The answer is {n}.",
    "**Answer:** N": lambda n: f"Add them up.\n\n**Answer:** {n}",
    "1,234": lambda n: rf"\boxed{{{n:,}}}" if abs(n) >= 1000 else None,
    r"1{,}234": lambda n: rf"\boxed{{{n:,}}}".replace(",", "{,}") if abs(n) >= 1000 else None,
    r"1\,234": lambda n: rf"\boxed{{{n:,}}}".replace(",", r"\,") if abs(n) >= 1000 else None,
    "thin space": lambda n: rf"\boxed{{{n:,}}}".replace(",", "\u2009") if abs(n) >= 1000 else None,
    "$N": lambda n: f"The answer is ${n}.",
    r"\$N": lambda n: rf"The answer is $\${n}$.",
    "N.0": lambda n: rf"\boxed{{{n}.0}}",
    "N.00": lambda n: f"The answer is ${n:,}.00.",
    "trailing dot": lambda n: rf"\boxed{{{n}.}}",
    "2N/2": lambda n: rf"\boxed{{{2 * n}/2}}",
    r"\frac{2N}{2}": lambda n: rf"\boxed{{\frac{{{2 * n}}}{{2}}}}",
    "100N%": lambda n: rf"\boxed{{{100 * n}\%}}",
    "N%": lambda n: rf"\boxed{{{n}\%}}",
    "N apples": lambda n: f"The answer is {n} apples.",
    "N dollars per day": lambda n: f"The answer is {n} dollars per day.",
    r"N\text{ cm}": lambda n: rf"\boxed{{{n}\text{{ cm}}}}",
    "x = N": lambda n: rf"\boxed{{x = {n}}}",
    r"\text{Total} = N": lambda n: rf"\boxed{{\text{{Total}} = {n}}}",
    "**N**": lambda n: f"The answer is **{n}**.",
    "$N$": lambda n: f"The answer is ${n}$.",
    r"\(N\)": lambda n: rf"The answer is \({n}\).",
    r"\[N\]": lambda n: f"The answer is\n\\[\n{n}\n\\]",
    "Ne0": lambda n: rf"\boxed{{{n / 1000!r}e3}}" if n % 10 == 0 else None,
    r"N \times 10^0": lambda n: rf"\boxed{{{n} \times 10^{{0}}}}",
    "full-width digits": lambda n: rf"\boxed{{{str(n).translate({48 + i: 0xFF10 + i for i in range(10)})}}}",
    "Arabic digits": lambda n: rf"\boxed{{{str(n).translate({48 + i: 0x0660 + i for i in range(10)})}}}",
    "left to compute: N-1+1": lambda n: rf"\boxed{{{n - 1}+1}}",
    "last number of a sentence": lambda n: f"So she makes {n} in all.",
}


def main() -> None:
    """Print the two counts and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="GSM8K's test.jsonl or train.jsonl")
    solutions = [json.loads(line)["answer"] for line in parser.parse_args().file.read_text("utf-8").splitlines()]

    # Accepted solutions, and accepted ones with a wrong number after the four hashes.
    began = time.perf_counter()
    right = sum(_accepts(solution, solution) for solution in solutions)
    wrong = sum(_accepts(_another_number(solution), solution) for solution in solutions)
    rate = 2 * len(solutions) / (time.perf_counter() - began)
    print(f"{right} of {len(solutions)} solutions score 1, {wrong} with another number; {rate:.0f} verdicts/s\n")

    # False negatives of each form, which depends on the number only. math-verify gets the response and the number.
    print(f"| {'form':26} | answers | refused by `math` | refused by math-verify |\n|---|---|---|---|")
    references = (given_answer(solution, math_verifier.same)[0] for solution in solutions)
    numbers = sorted({int(reference.replace(",", "")) for reference in references})
    for form, write in FORMS.items():
        pairs = [(text, n) for n in numbers if (text := write(n)) is not None]
        refused = sum(not _accepts(text, str(n)) for text, n in pairs)
        refused_by_math_verify = sum(not _math_verify_accepts(text, str(n)) for text, n in pairs)
        print(f"| {form:26} | {len(pairs)} | {refused} | {refused_by_math_verify} |")


def _accepts(response: str, reference: str) -> bool:
    answer = math_verifier.find(response)
    return answer is not None and math_verifier.verify(answer, _row(reference)).reward == 1


def _math_verify_accepts(response: str, reference: str) -> bool:
    return bool(math_verify.verify(math_verify.parse(reference), math_verify.parse(response)))


def _row(reference: str) -> VerifierRow:
    return {"id": "0", "prompt": "", "answer": reference, "metadata": {}, "columns": {}}


def _another_number(solution: str) -> str:
    working, _, number = solution.rpartition("####")
    return f"{working}#### {int(number.replace(',', '')) + 1}"


if __name__ == "__main__":
    main()
