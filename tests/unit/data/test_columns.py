"""Data files whose columns have other names than this project's, with and without conversations."""

import json

import pytest

from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.columns import Guess, guess_columns
from megatron_brorl.data.prompts import RowFormat, read_rows
from megatron_brorl.errors import UserError

GSM8K = {"question": "Ann has 3 nuts and gets 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
TURN = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "It is 4."}
VERL = {"prompt": [TURN], "data_source": "own", "reward_model": {"style": "rule", "ground_truth": "4"}}
VERL_ANSWER = "reward_model.ground_truth"


def read(tmp_path, *rows, **columns):
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(path, RowFormat(columns=ColumnsConfig(**columns)))


@pytest.mark.parametrize(
    ("raw", "columns", "answer", "target"),
    [
        ({"q": "x", "a": 42, "split": "train"}, {"prompt": "q", "answer": "a"}, "42", None),
        ({"q": "x", "a": "1", "cot": "so 1"}, {"prompt": "q", "answer": "a", "target": "cot"}, "1", "so 1"),
        ({"prompt": "x", "a": {"b": {"c": "9"}}}, {"answer": "a.b.c"}, "9", None),
        ({"prompt": "x", "a.b": "3", "a": {"b": "4"}}, {"answer": "a.b"}, "3", None),  # the exact name comes first
        # The whole answer is the target. The last match counts.
        ({"prompt": "x", "answer": "1 then 3!"}, {"answer_regex": r"\d"}, "3", "1 then 3!"),
        ({"prompt": "x", "answer": "so\n#### 7"}, {"answer_regex": "#### (.+)"}, "7", "so\n#### 7"),
    ],
)
def test_named_columns_are_read(tmp_path, raw, columns, answer, target):
    (row,) = read(tmp_path, raw, **columns)
    assert (row.prompt, row.answer, row.target) == ("x", answer, target)


def test_the_last_message_of_the_assistant_is_the_target(tmp_path):
    (row,) = read(tmp_path, {"messages": [TURN, REPLY], "id": 7}, prompt="messages")
    assert (row.prompt, row.target, row.answer, row.id) == ([TURN], "It is 4.", "It is 4.", "7")
    (row,) = read(tmp_path, {"prompt": [TURN, REPLY], "answer": "4"})
    assert (row.target, row.answer) == ("It is 4.", "4")


@pytest.mark.parametrize(
    ("raw", "columns", "named"),
    [
        (GSM8K, {"prompt": "problem"}, "data.columns.prompt = 'problem'"),
        (GSM8K, {"prompt": "question", "answer_regex": "@(.+)"}, "f.jsonl:1: the answer has no match of data.columns"),
        (GSM8K, {"prompt": "question", "answer_regex": "("}, "data.columns.answer_regex = '('"),
        ({"prompt": [TURN, REPLY], "target": "z"}, {}, "f.jsonl:1: "),
    ],
)
def test_mistakes_name_the_row_or_the_key(tmp_path, raw, columns, named):
    with pytest.raises(UserError) as error:
        read(tmp_path, raw, **columns)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("row", "columns", "others", "is_chat", "is_scored"),
    [
        (GSM8K, {"prompt": "question", "answer": "answer", "answer_regex": "#### (.+)"}, [], False, True),
        (VERL, {"prompt": "prompt", "answer": VERL_ANSWER}, ["data_source", "reward_model"], True, True),
        ({"problem": "x", "solution": "1"}, {"prompt": "problem", "answer": "solution"}, [], False, True),
        ({"problem": "x", "expected_answer": 3}, {"prompt": "problem", "answer": "expected_answer"}, [], False, True),
        ({"prompt": "x", "answer": "1", "metadata": {}}, {}, [], False, True),
        ({"prompt": "x", "answer": 42}, {}, [], False, True),
        ({"prompt": "x"}, {}, [], False, False),
        ({"prompt": "x", "label": {"func_name": "f"}, "split": None}, {"prompt": "prompt"}, ["label"], False, False),
        ({"prompt": "x", "target": "y"}, {}, [], False, True),
        ({"prompt": "x", "verifier": "none"}, {}, [], False, True),
        ({"prompt": "x", "answer": ["a", "b"]}, {"prompt": "prompt"}, ["answer"], False, False),
        ({"prompt": {}, "query": "y", "answer": True}, {"prompt": "query"}, ["prompt", "answer"], False, False),
        ({"messages": [TURN]}, {"prompt": "messages"}, [], True, False),
        ({"messages": [TURN, REPLY]}, {"prompt": "messages"}, [], True, True),
    ],
)
def test_columns_are_guessed_from_the_first_row(tmp_path, row, columns, others, is_chat, is_scored):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert guess_columns(path, {}) == Guess(columns, others, is_chat, is_scored)
    [parsed] = read_rows(path, RowFormat("none", columns=ColumnsConfig(**columns)))
    assert isinstance(parsed.prompt, list) == is_chat
    assert (parsed.answer is not None or "verifier" in row) == is_scored


OBJECTS = [  # arguments of a check, as in RLVR-IFeval, IF multi-constraints (allenai) and code with tests
    '{"func_name": "validate_lowercase", "N": null}',
    "[{'instruction_id': ['keywords:existence'], 'kwargs': [None]}]",
    ' { "inputs": ["1"], "outputs": ["2"]}',
]


@pytest.mark.parametrize("key", ["answer", "ground_truth"])
@pytest.mark.parametrize("text", [*OBJECTS, "\\{1, 2\\}", "{1, 2}", "[1, 2]", '"a": 1', "{}", "[]", "{a: b}"])
def test_sets_and_lists_are_answers_and_arguments_of_a_check_are_not(tmp_path, key, text):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({"prompt": "x", key: text}))
    guess = guess_columns(path, {})
    assert guess.is_scored == (text not in OBJECTS)
    row_format = RowFormat("math", columns=ColumnsConfig(answer=key))
    if guess.is_scored:
        assert read_rows(path, row_format)[0].answer == text
    else:
        assert "answer" not in guess.columns
        with pytest.raises(UserError, match=r"f\.jsonl:1: answer is an object with the arguments of a check"):
            read_rows(path, row_format)
