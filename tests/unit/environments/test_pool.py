"""Tests of environments and tool calls that hang, crash, raise, and return strange values, and of their pool."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_brorl.environments.pool import EnvironmentPool, Reply
from megatron_brorl.errors import UserError
from megatron_brorl.types import ScoreResult

FILE = Path(__file__).with_name("hostile_environments.py")
HOSTILE = f"{FILE}:Hostile"
ACT = '<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call>'


class Client:
    """A pool whose calls wait for the reply."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool

    def reset(self, episode: int, **code: str) -> Reply:
        row = {"id": "a", "prompt": "b", "answer": None, "metadata": code}
        return self._wait(lambda reply: self.pool.reset(episode, row, reply))

    def step(self, episode: int, text: str = ACT, last: bool = False) -> Reply:
        return self._wait(lambda reply: self.pool.step(episode, text, last, reply))

    def pids(self) -> list[int]:
        return [process._process.pid for process in self.pool._processes]

    @staticmethod
    def _wait(call: Any) -> Reply:
        replies: queue.Queue[Reply] = queue.Queue()
        call(replies.put)
        return replies.get(timeout=60)


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, Client]]:
    settings = {"tools": ("Hostile", 60.0), "impatient": ("Hostile", 2.0), "steps": ("Steps", 60.0)}
    with ExitStack() as stack:
        yield {
            name: Client(stack.enter_context(EnvironmentPool(f"{FILE}:{factory}", 2, seconds, "hermes")))
            for name, (factory, seconds) in settings.items()
        }


def error(reason: str) -> ScoreResult:
    return ScoreResult(0.0, "error", reason)


def invalid(value: str) -> ScoreResult:
    return ScoreResult(0.0, "invalid", f"returned {value} for a reward, not a finite number (1e+30 at most)")


class Lost(str):
    pass


NOT_JSON = "is not JSON serializable"
HANGS = Lost("no answer in 2 s")
CORRUPT = Lost("wrote a result that is not a reply")

# (method, code of the method, expected content of the message, score, or reason of the loss)
CASES = [
    ("reset", "result = 5", "5"),
    ("reset", "result = (i for i in ())", error(f"TypeError: Object of type generator {NOT_JSON}")),
    ("reset", "os._exit(0)", Lost("exit code 0")),
    ("act", "raise ValueError('with \\x1b[31m\\nnewlines')", error("ValueError: with ?[31m")),
    ("act", "raise ValueError('x' * 10_000_000)", error("ValueError: " + "x" * 288)),
    ("act", "raise ValueError('\\ud800')", error("ValueError: ?")),
    ("act", "raise Odd", error("Odd")),
    ("act", "sys.exit(3)", error("SystemExit: 3")),
    ("act", "recurse()", error("RecursionError: maximum recursion depth exceeded")),
    ("act", "while True: pass", HANGS),
    ("act", "os.kill(os.getpid(), signal.SIGSTOP); threading.Event().wait()", HANGS),
    ("act", "threading.Event().wait()", HANGS),
    ("act", "os.kill(os.getpid(), signal.SIGKILL)", Lost("killed by SIGKILL, perhaps for lack of memory")),
    ("act", "ctypes.string_at(0)", Lost("killed by SIGSEGV, perhaps for lack of memory")),
    ("act", "os.closerange(3, 256)", Lost("exit code 1")),
    ("act", "write_everywhere(b'[' * 100_000 + b'\\n')", CORRUPT),
    ("act", "write_everywhere(b'[-1, [[], false, null, 0, 0]]\\n')", CORRUPT),
    ("act", "write_everywhere(b'x' * (3 << 20))", CORRUPT),
    ("act", "for _ in range(100): print('x' * 1_000_000, file=sys.stderr); print('y' * 1_000_000)", "turn 1"),
    ("act", "os.write(1, b'[1]\\n'); sys.stdout.close(); os.close(1); os.close(2)", "turn 1"),
    ("act", "result = sys.stdin.read()", ""),
    ("act", "os.fork() or os.execlp('sleep', 'sleep', '60')", "turn 1"),
    ("act", "os.kill(os.getpid(), signal.SIGTERM)", "turn 1"),
    ("act", "result = None", "null"),
    ("act", "result = {'ä': [1, True, '😀']}", '{"ä": [1, true, "😀"]}'),
    ("act", "result = b'bytes'", error(f"TypeError: Object of type bytes {NOT_JSON}")),
    ("act", "result = []; result.append(result)", error("ValueError: Circular reference detected")),
    ("act", "result = '😀' * 10_000_000", "😀" * 4096 + "\n[9995904 more characters]"),
    ("act", "result = 'a\\ud800\\0'", "a?\0"),
    ("act", "result = '<|im_end|>\\n</tool_response>'", "<|im_end|>\n</tool_response>"),
    ("act", "result = 'torch' in sys.modules", "false"),
    ("final", "raise ValueError(self.text)", error("ValueError: the answer")),
    ("reward", "result = float('nan')", invalid("nan")),
    ("reward", "result = '1'", invalid("'1'")),
    ("reward", "os.abort()", Lost("killed by SIGABRT, perhaps for lack of memory")),
    ("step", "result = 'ab'", error("TypeError: step must return a tuple (observation, done)")),
    ("step", "result = 'over', True", ScoreResult(1.0, "ok")),
]


@pytest.mark.parametrize(("method", "code", "expected"), CASES)
def test_a_hostile_environment_ends_only_its_own_episodes(
    clients: dict[str, Client], capfd: pytest.CaptureFixture[str], method: str, code: str, expected: Any
) -> None:
    client = clients["impatient" if expected is HANGS else "steps" if method == "step" else "tools"]
    assert not client.reset(0).done  # lives in the other process
    reply = client.reset(1, **{"act" if method == "step" else method: code})
    if method != "reset":
        assert reply == Reply((), False, None)
        reply = client.step(1, ACT if method == "act" else "the answer")
    if isinstance(expected, Lost):
        assert reply == Reply((), True, None, lost=f"environment lost: {expected}")
    elif isinstance(expected, ScoreResult):
        assert reply == Reply((), True, expected, calls=int(method == "act"))
        assert reply.score is not None
        assert reply.score.reason.startswith(expected.reason)
    else:
        name = {"name": "act"} if method == "act" else {}
        message = {"role": "tool" if name else "user", "content": expected, **name}
        assert reply == Reply((message,), False, None, calls=len(name))

    other = client.step(0, last=True)
    assert (other.score, other.lost) == (ScoreResult(1.0, "ok"), "")
    client.pool.end(1)
    assert capfd.readouterr() == ("", "")


def hermes(**call: Any) -> str:
    return f"<tool_call>{json.dumps(call)}</tool_call>"


MALFORMED = [
    ("<tool_call>{'name': 'act'}</tool_call>", "cannot be parsed as JSON"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "cannot be parsed as JSON"),
    ('<tool_call>{"name": "act", "arguments": {}}', "the end tag is missing"),
    ("<tool_call>[1]</tool_call>", "must be a JSON object"),
    (hermes(name="act", arguments="{}"), '"arguments", which are an object'),
    (hermes(name="reward", arguments={}), "no tool 'reward'; the tools are act, add"),
    (hermes(name="\ud800" * 1000, arguments={}), "no tool"),
    (hermes(name="add", arguments={"a": 1}), "argument b: Missing required argument"),
    (hermes(name="add", arguments={"a": 1, "b": [2]}), "argument b: Input should be a valid integer"),
    (hermes(name="act", arguments={"number": 1, "<|x|>": 2}), "argument <|x|>: Unexpected keyword argument"),
    (hermes(name="act", arguments={"self": 1}), "argument self: Got multiple values"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_a_malformed_call_gives_an_error_to_the_model(clients: dict[str, Client], text: str, message: str) -> None:
    tools = clients["tools"]
    tools.reset(0)
    reply = tools.step(0, f"{hermes(name='add', arguments={'a': '2', 'b': 3})} and {text}")
    good, bad = reply.messages
    assert good == {"role": "tool", "name": "add", "content": "5"}
    assert bad["content"].startswith("error: ")
    assert message in bad["content"]
    assert len(bad["content"]) < 300
    assert (reply.done, reply.calls, reply.malformed) == (False, 2, 1)
    assert tools.step(0, "done").score == ScoreResult(1.0, "ok")


def test_at_most_16_calls_of_a_turn_are_executed_also_of_the_last_one(clients: dict[str, Client]) -> None:
    tools = clients["tools"]
    tools.reset(0, reward="result = self.turns")
    reply = tools.step(0, ACT * 20)
    *results, error = (message["content"] for message in reply.messages)
    assert results == [f"turn {i + 1}" for i in range(16)]
    assert error.startswith("error: at most 16 calls")
    assert (reply.calls, reply.malformed) == (17, 1)
    assert tools.step(0, ACT + ACT, last=True) == Reply((), True, ScoreResult(18.0, "ok"), calls=2)


def test_calls_that_wait_run_at_the_same_time_and_episodes_keep_their_state() -> None:
    with EnvironmentPool(HOSTILE, 1, 60.0, "hermes") as pool:
        client = Client(pool)
        for i in range(32):
            client.reset(i, act=f"BARRIER.wait(); result = {100 * i} + self.turns")
        replies: queue.Queue[tuple[int, str]] = queue.Queue()
        for turn in (1, 2):
            for i in range(32):
                pool.step(i, ACT, False, lambda reply, i=i: replies.put((i, reply.messages[0]["content"])))
            assert sorted(replies.get(timeout=60) for _ in range(32)) == [(i, str(100 * i + turn)) for i in range(32)]


def test_all_episodes_of_a_process_are_lost_and_later_ones_live() -> None:
    with EnvironmentPool(HOSTILE, 1, 60.0, "hermes") as pool:
        client = Client(pool)
        client.reset(1)
        client.reset(2, act="os._exit(4)")
        pid = client.pids()[0]
        assert client.step(2).lost == client.step(1).lost == "environment lost: exit code 4"
        assert not client.reset(3).done
        assert client.step(3).messages[0]["content"] == "turn 1"
        assert client.pids() != [pid]
        assert not psutil.pid_exists(pid)


def test_an_ended_episode_gets_no_reply_and_leaves_no_object() -> None:
    with EnvironmentPool(HOSTILE, 1, 60.0, "hermes") as pool:
        client = Client(pool)
        replies: list[Reply] = []
        client.reset(0, act="result = len(LIVE)")
        for i in (1, 2):
            client.reset(i, act="BARRIER.wait()")
            pool.step(i, ACT, False, replies.append)
        pool.reset(3, {"metadata": {"reset": "BARRIER.wait()"}}, replies.append)
        while client.step(0).messages[0]["content"] != "4":
            pass  # until the reset has begun
        for i in (1, 2, 3):
            pool.end(i)
        client.reset(4, act="BARRIER.abort()")
        client.step(4, last=True)
        while client.step(0).messages[0]["content"] != "1":
            pass  # until the calls that waited have returned
        assert not replies


def test_a_closed_pool_sends_no_reply() -> None:
    replies: list[Reply] = []
    pool = EnvironmentPool(HOSTILE, 1, 60.0, "hermes")
    client = Client(pool)
    client.reset(0, act="threading.Event().wait()")
    pids = client.pids()
    pool.step(0, ACT, False, replies.append)
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not replies
    with pytest.raises(RuntimeError, match="closed"):
        pool.step(0, ACT, False, replies.append)


class Local:
    def reset(self, row: dict[str, Any]) -> str:
        self.row = row
        return "begin"

    def act(self) -> str:
        raise ValueError(self.row["id"])

    def reward(self) -> float:
        return 0.5


def test_a_class_runs_in_this_process() -> None:
    with EnvironmentPool(Local, 1, 1.0, "tags") as pool:
        client = Client(pool)
        assert client.reset(0).messages == ({"role": "user", "content": "begin"},)
        client.reset(1)
        assert client.step(0, "<call>act</call>") == Reply((), True, error("ValueError: a"), calls=1)
        assert client.step(1, "no call") == Reply((), True, ScoreResult(0.5, "ok"))


def test_a_process_that_cannot_start_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module")
    with EnvironmentPool(f"{tmp_path}/broken.py:Broken", 1, 5.0, "hermes") as pool:
        client = Client(pool)
        for i in range(3):
            assert "no_such_module" in client.reset(i).lost
        with pytest.raises(UserError, match=r"broken\.py:Broken: its process cannot start: .*no_such_module"):
            client.reset(3)
