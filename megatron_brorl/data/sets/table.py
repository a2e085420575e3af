"""The published sets by name, with where they are, their licence and the words that ask for a form of answer."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_brorl.data.sets import code, instructions, mathematics, own, science
from megatron_brorl.data.sets.form import DataSet

_HUB = "https://huggingface.co/datasets/"

SETS: Mapping[str, DataSet] = {
    "gsm8k": DataSet("grade-school mathematics", f"{_HUB}openai/gsm8k", "MIT", mathematics.gsm8k),
    "math500": DataSet(
        "competition mathematics",
        f"{_HUB}HuggingFaceH4/MATH-500",
        "not stated; the texts of MATH are disputed",
        mathematics.math500,
        evaluation=True,
    ),
    "aime": DataSet(
        "American Invitational Mathematics Examination, any year",
        f"{_HUB}HuggingFaceH4/aime_2024, {_HUB}math-ai/aime25 and others",
        "problems are under copyright of the MAA",
        mathematics.aime,
        evaluation=True,
    ),
    "deepscaler": DataSet(
        "competition mathematics", f"{_HUB}agentica-org/DeepScaleR-Preview-Dataset", "MIT", mathematics.deepscaler
    ),
    "dapo": DataSet(
        "competition mathematics, whole-number answers",
        f"{_HUB}BytedTsinghua-SIA/DAPO-Math-17k",
        "Apache-2.0",
        mathematics.dapo,
    ),
    "eurus": DataSet("programming contests", f"{_HUB}PRIME-RL/Eurus-2-RL-Data", "MIT", code.eurus),
    "humaneval": DataSet("Python functions", f"{_HUB}openai/openai_humaneval", "MIT", code.humaneval, evaluation=True),
    "mbpp": DataSet("Python functions", f"{_HUB}google-research-datasets/mbpp", "CC BY 4.0", code.mbpp),
    "scp116k": DataSet("university sciences", f"{_HUB}EricLu/SCP-116K", "CC BY-NC-SA 4.0", science.scp116k),
    "gpqa": DataSet(
        "graduate sciences, four choices", f"{_HUB}Idavidrein/gpqa", "CC BY 4.0", science.gpqa, evaluation=True
    ),
    "ifeval": DataSet(
        "checkable instructions", f"{_HUB}google/IFEval", "Apache-2.0", instructions.ifeval, evaluation=True
    ),
    "rows": DataSet("rows of this project", "your own", "not stated", own.rows),
}
CUSTOM = "custom"  # columns named by options

# By verifier: what follows a problem. One line each, so that it can be told from the problem again.
INSTRUCTIONS: Mapping[str, str] = {
    "math": r"Let's think step by step and output the final answer within \boxed{}.",
    "short_answer": r"Let's think step by step and output the final answer within \boxed{}.",
    "choice": r"Let's think step by step and output the letter of the right choice within \boxed{}.",
    "code": "Write Python code that solves this and put all of it into one block that begins with ```python.",
}


def without_instruction(problem: str) -> str:
    """The problem alone, where a preparation put an instruction behind it."""
    for instruction in INSTRUCTIONS.values():
        problem = problem.removesuffix(f"\n\n{instruction}")
    return problem
