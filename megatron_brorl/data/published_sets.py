"""Published data sets: columns, verifiers, and conversions for rows that need more than a column name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.columns import map_columns
from megatron_brorl.errors import UserError

JsonRow = dict[str, Any]  # a row with the keys of data/prompts.py
_MAX_SHORT_ANSWER = 120  # characters; a longer answer is a derivation, which cannot be compared
_BOXED = r"Let's think step by step and output {} within \boxed{{}}."
INSTRUCTIONS: Mapping[str, str] = {  # Text after a problem, by verifier.
    "math": _BOXED.format("the final answer"),
    "short_answer": _BOXED.format("the final answer"),
    "choice": _BOXED.format("the letter of the right choice"),
    "code": "Write Python code that solves this and put all of it into one block that begins with ```python.",
}
# The imports and the recursion limit that LiveCodeBench puts in front of every program (testing_util.py). verl's scorer
# of Eurus-2-RL has the same imports.
_MODULES = "string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, "
_MODULES += "operator, io, sys, json"
PRELUDE = "\n".join(f"from {name} import *" for name in (*_MODULES.split(", "), "builtins", "typing"))
PRELUDE += f"\nimport {_MODULES}\nsys.setrecursionlimit(50_000)"


class Unusable(Exception):
    """The reason why a row cannot become a prompt."""


@dataclass(frozen=True)
class DataSet:
    """A published set. `hub` is its name on Hugging Face's hub, "" for a file of the user."""

    hub: str
    licence: str
    verifier: str
    prompt: str = ""  # a column, as in data.columns; "a|b" means the first that a row has
    answer: str = ""
    answer_regex: str = ""
    id: str = ""
    frame: str = ""  # regular expression of a prompt with the set's own words; group 1 is the problem
    convert: Callable[[Mapping[str, Any], JsonRow], JsonRow] | None = None  # (published row, row) -> keys that change
    test: bool = False  # must not be trained on

    def row(self, raw: Any, where: str) -> JsonRow:
        """Convert a published row to the keys of this project. Raises Unusable or UserError."""
        if not isinstance(raw, dict):
            raise UserError(f"{where}: a row must be an object with a value for each column")
        if self.id:
            if self.id not in raw:
                raise UserError(f"{where}: not a row of {self.hub}: there is no column {self.id!r}")
            raw = {**raw, "id": raw[self.id]}
        columns = ColumnsConfig(
            prompt=_first(self.prompt, raw), answer=_first(self.answer, raw), answer_regex=self.answer_regex
        )
        row: JsonRow = {key: value for key, value in map_columns(raw, columns, where)[0].items() if value is not None}
        if self.verifier:
            row["verifier"] = self.verifier
        try:
            if self.frame:
                text = row["prompt"][-1]["content"] if isinstance(row["prompt"], list) else row["prompt"]
                match = re.fullmatch(self.frame, text, re.DOTALL)
                row["prompt"] = (match[1] if match else text).strip()
            row |= self.convert(raw, row) if self.convert else {}
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{where}: not a row of {self.hub}: {type(e).__name__}: {e}") from None
        answer = row.get("answer")
        if row.get("verifier") == "short_answer" and isinstance(answer, str) and len(answer) > _MAX_SHORT_ANSWER:
            raise Unusable(f"answer longer than {_MAX_SHORT_ANSWER} characters")
        return row


def without_instruction(problem: str) -> str:
    """Return a problem without the instruction that a preparation appended."""
    for instruction in INSTRUCTIONS.values():
        problem = problem.removesuffix(f"\n\n{instruction}")
    return problem


def _first(names: str, raw: Mapping[str, Any]) -> str:
    *others, last = names.split("|")
    return next((name for name in others if raw.get(name) is not None), last)


def _eurus(raw: Mapping[str, Any], row: JsonRow) -> JsonRow:
    """Read the tests of a program, {"inputs", "outputs"}, or of a function, which has "fn_name" too."""
    if raw["ability"] != "code":
        raise Unusable("not a row of code")
    tests = _parsed(raw["reward_model"]["ground_truth"])
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise Unusable("no tests, or not as many outputs as inputs")
    pairs = list(zip(inputs, outputs, strict=True))
    name = tests.get("fn_name")
    if not name:
        scripts = [{"input": _text(i), "output": _text(o)} for i, o in pairs]
        return {"answer": None, "metadata": {"tests": scripts, "prelude": PRELUDE}}

    # A call is a list of arguments, with its expected value in a list (APPS), or text with one JSON argument per line.
    in_lists = all(isinstance(i, list) and isinstance(o, list) and len(o) == 1 for i, o in pairs)
    calls = [
        {"args": arguments, "expected": expected[0]}
        if in_lists
        else {"args": [_parsed(line) for line in arguments.split("\n") if line.strip()], "expected": _parsed(expected)}
        for arguments, expected in pairs
    ]
    return {"answer": None, "metadata": {"function": name, "tests": calls, "prelude": PRELUDE}}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Unusable("tests that are not JSON") from None


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "\n".join(lines)


def _humaneval(raw: Mapping[str, Any], row: JsonRow) -> JsonRow:
    """Run program and tests after the code above the function in the prompt: its imports and helpers."""
    function = raw["entry_point"]
    tests = f"{raw['test'].strip()}\n\ncheck({function})"
    above = re.split(rf"^(?:async )?def {function}\b", row["prompt"], maxsplit=1, flags=re.MULTILINE)[0].strip()
    metadata = {"function": function, "asserts": [tests], "prelude": above, "setup": above}
    return {"prompt": row["prompt"].strip("\n"), "metadata": {key: text for key, text in metadata.items() if text}}


def _mbpp(raw: Mapping[str, Any], row: JsonRow) -> JsonRow:
    """Show the tests, as the paper of the set does, and find the function that the first of them calls."""
    tests = [line.strip() for line in raw["test_list"]]
    names = re.findall(r"^def (\w+)", raw["code"], re.MULTILINE)
    function = next((name for name in names if re.search(rf"\b{name}\(", tests[0])), None)
    if function is None:
        raise Unusable("tests that call none of the solution's functions")
    setup = "\n".join([*(raw.get("test_imports") or []), raw.get("test_setup_code") or ""]).strip()
    shown = "\n".join([row["prompt"].strip(), "", "Your code should pass these tests:", *tests])
    return {"prompt": shown, "metadata": {"function": function, "asserts": tests, "setup": setup}}


def _gpqa(raw: Mapping[str, Any], row: JsonRow) -> JsonRow:
    """Order the choices by a hash of question and choice, so that the correct one has no preferred position."""
    question = row["prompt"].strip()
    choices = [raw[name].strip() for name in ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))]
    ordered = sorted(choices, key=lambda choice: hashlib.blake2b(f"{question}\0{choice}".encode()).digest())
    if len(set(choices)) < len(choices):
        raise Unusable("two choices are the same")
    shown = "\n".join(f"{letter}) {choice}" for letter, choice in zip("ABCD", ordered, strict=True))
    answer = "ABCD"[ordered.index(choices[0])]
    return {"prompt": f"{question}\n\n{shown}", "answer": answer, "metadata": {"choices": ordered}}


def _ifeval(raw: Mapping[str, Any], row: JsonRow) -> JsonRow:
    return {"metadata": {key: raw[key] for key in ("instruction_id_list", "kwargs")}}


_DAPO = r"Solve the following math problem step by step\.[^\n]*\n\n(.*)\n\nRemember to put your answer on its .*"
_EURUS = r"(.*?)\n\nWrite Python code to solve the problem\..*"
_MAA = "problems are under copyright of the MAA"
SETS: Mapping[str, DataSet] = {  # positional arguments: hub, licence, verifier, prompt, answer
    "gsm8k": DataSet("openai/gsm8k", "MIT", "math", "question", "answer", answer_regex=r"####\s*(.+)"),
    "math500": DataSet("HuggingFaceH4/MATH-500", "not stated", "math", "problem", "answer", id="unique_id", test=True),
    "aime": DataSet("HuggingFaceH4/aime_2024", _MAA, "math", "problem|Problem|question", "answer|Answer", test=True),
    "deepscaler": DataSet("agentica-org/DeepScaleR-Preview-Dataset", "MIT", "math", "problem", "answer"),
    "dapo": DataSet(
        "BytedTsinghua-SIA/DAPO-Math-17k", "Apache-2.0", "math", "prompt", "reward_model.ground_truth", frame=_DAPO
    ),
    "eurus": DataSet("PRIME-RL/Eurus-2-RL-Data", "MIT", "code", "prompt", frame=_EURUS, convert=_eurus),
    "humaneval": DataSet(
        "openai/openai_humaneval", "MIT", "code", "prompt", id="task_id", convert=_humaneval, test=True
    ),
    "mbpp": DataSet("google-research-datasets/mbpp", "CC BY 4.0", "code", "text|prompt", id="task_id", convert=_mbpp),
    "scp116k": DataSet(
        "EricLu/SCP-116K", "CC BY-NC-SA 4.0", "short_answer", "problem", "answer|extract_solution|solution"
    ),
    "gpqa": DataSet("Idavidrein/gpqa", "CC BY 4.0", "choice", "Question", id="Record ID", convert=_gpqa, test=True),
    "ifeval": DataSet("google/IFEval", "Apache-2.0", "ifeval", "prompt", id="key", convert=_ifeval, test=True),
    "rows": DataSet(hub="", licence="your own", verifier=""),
}
