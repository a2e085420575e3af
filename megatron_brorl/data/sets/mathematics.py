"""Mathematics with a final answer: GSM8K, MATH-500, AIME, DeepScaleR, DAPO-Math-17k."""

from __future__ import annotations

from megatron_brorl.data.sets.form import Raw, Task, Unusable, last_message, nested, plain, text
from megatron_brorl.errors import UserError

# What DAPO-Math-17k wraps every problem in; a run has words of its own for that.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line after"


def gsm8k(raw: Raw, where: str) -> Task:
    """question, and an answer whose last line is `#### 72`."""
    _, mark, answer = text(raw, where, "answer").rpartition("####")
    if not mark:
        raise UserError(f"{where}: the answer has no line '#### ...'; is it another set?")
    return _task(text(raw, where, "question"), answer.strip().replace(",", ""))


def math500(raw: Raw, where: str) -> Task:
    """problem, solution, answer, subject, level, unique_id."""
    return _task(text(raw, where, "problem"), plain(raw, where, "answer"), str(raw.get("unique_id") or ""))


def aime(raw: Raw, where: str) -> Task:
    """problem and answer, in any of the published spellings; the answer is a whole number from 0 to 999."""
    answer = plain(raw, where, "answer", "Answer")
    if not answer.isdecimal() or int(answer) > 999:
        raise UserError(f"{where}: the answer {answer!r} is no whole number from 0 to 999; is it another set?")
    return _task(text(raw, where, "problem", "Problem", "question"), str(int(answer)))


def deepscaler(raw: Raw, where: str) -> Task:
    """problem, answer, solution."""
    return _task(text(raw, where, "problem"), plain(raw, where, "answer"))


def dapo(raw: Raw, where: str) -> Task:
    """prompt (messages, or text in processed copies) and reward_model.ground_truth; the frame is taken off."""
    prompt = raw.get("prompt")
    problem = prompt if isinstance(prompt, str) else last_message(raw, where, "prompt")
    if problem.startswith(_DAPO_BEFORE):
        # Three parts between blank lines: what to do, the problem, what to do once more.
        problem = problem.partition("\n\n")[2].rpartition(f"\n\n{_DAPO_AFTER}")[0] or problem
    return _task(problem, str(nested(raw, where, "reward_model", "ground_truth")))


def _task(problem: str, answer: str, row_id: str = "") -> Task:
    if not answer.strip():
        raise Unusable("no answer")
    if not problem.strip():
        raise Unusable("no problem")
    return Task(problem.strip(), answer.strip(), "math", id=row_id)
