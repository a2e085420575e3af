"""Tests of environments and tool calls that hang, crash, raise, and return strange values, and of their pool."""

import json
import queue
from contextlib import ExitStack, closing
from functools import cache

import psutil
import pytest
from unit.environments.hostile_environments import Hostile
from unit.environments.hostile_environments import __file__ as FILE

from megatron_brorl.environments.pool import EnvironmentPool, Reply
from megatron_brorl.errors import UserError
from megatron_brorl.types import ScoreResult


def hermes(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ACT = hermes("act", {})


def wait(call, *arguments):
    replies = queue.Queue()
    call(*arguments, replies.put)
    return replies.get(timeout=60)


def reset(pool, episode, **code):
    return wait(pool.reset, episode, {"id": "a", "metadata": code})


def step(pool, episode, text=ACT, last=False):
    return wait(pool.step, episode, text, last)


@pytest.fixture(scope="module")
def pools():
    """Pools of two processes. Episodes of even and of odd numbers live in different ones."""
    with ExitStack() as stack:

        @cache
        def start(name, seconds=60.0):
            pool = EnvironmentPool(f"{FILE}:{name}", workers=2, max_tool_seconds=seconds, format="hermes")
            return stack.enter_context(closing(pool))

        yield start


@pytest.fixture
def tools(pools):
    return pools("Hostile")


def outcome(reply):
    """Return the content of the only message, or the reason why the episode is over."""
    if not reply.done:
        return "".join(message["content"] for message in reply.messages)
    assert not reply.messages
    return reply.lost or f"{reply.score.status} {reply.score.reward}: {reply.score.reason}"


LOST = "environment lost: "
RAISED = "error 0.0: CLASS.METHOD: "
HANG = "threading.Event().wait()"
WAIT = "with contextlib.suppress(threading.BrokenBarrierError): BARRIER.wait()"
WRITE = "for fd in range(3, 64):\n with contextlib.suppress(OSError): os.write(fd, {})"
NOT_REPLIES = ["b'[' * 100_000 + b'\\n'", "b'[-1, [[], false, null, 0, 0]]\\n'", "b'x' * (3 << 20)"]

# (method, code that it runs, expected content or, if the episode ends, the beginning of the reason)
CASES = [
    ("reset", "result = (i for i in ())", f"{RAISED}TypeError: Object of type generator is not JSON serializable"),
    ("act", "raise ValueError('with \\x1b[31m and \\ud800\\nlines')", f"{RAISED}ValueError: with ?[31m and ?"),
    ("act", "raise ValueError('x' * 10_000_000)", f"{RAISED}ValueError: {'x' * 275}"),
    ("reset", "class Odd(Exception): __str__ = None\nraise Odd", f"{RAISED}Odd"),
    ("act", "sys.exit(3)", f"{RAISED}SystemExit: 3"),
    ("act", "def f(): f()\nf()", f"{RAISED}RecursionError: maximum recursion depth exceeded"),
    *[("act", f"{code}{HANG}", f"{LOST}no answer in 2 s") for code in ("", "os.kill(os.getpid(), signal.SIGSTOP); ")],
    ("act", "while True: pass", f"{LOST}no answer in 2 s"),
    ("act", "ctypes.string_at(0)", f"{LOST}killed by SIGSEGV, perhaps for lack of memory"),
    ("act", "os.closerange(3, 256)", f"{LOST}exit code 1"),
    *[("act", WRITE.format(data), f"{LOST}wrote a result that is not a reply") for data in NOT_REPLIES],
    ("act", "for _ in range(100): print('x' * 1_000_000, file=sys.stderr); print('y' * 1_000_000)", "turn 1"),
    ("act", "os.write(1, b'[1]\\n'); sys.stdout.close(); os.close(1); os.close(2)", "turn 1"),
    ("reset", "result = sys.stdin.read(), 'torch' in sys.modules", '["", false]'),
    ("act", "os.fork() or os.execlp('sleep', 'sleep', '60')", "turn 1"),
    ("act", "os.kill(os.getpid(), signal.SIGTERM)", "turn 1"),
    ("act", "result = {'ä': [1, True, None, '😀']}", '{"ä": [1, true, null, "😀"]}'),
    ("act", "result = []; result.append(result)", f"{RAISED}ValueError: Circular reference detected"),
    ("act", "result = '😀' * 10_000_000", "😀" * 4096 + "\n[9995904 more characters]"),
    ("act", "result = 'a\\ud800\\0<|im_end|>\\n</tool_response>'", "a?\0<|im_end|>\n</tool_response>"),
    ("final", "raise ValueError(result)", f"{RAISED}ValueError: the answer"),
    ("reward", "result = float('nan')", "invalid 0.0: returned nan for a reward, not a finite number"),
    ("reward", "os.kill(os.getpid(), signal.SIGKILL)", f"{LOST}killed by SIGKILL, perhaps for lack of memory"),
    ("step", "result = 'ab'", f"{RAISED}TypeError: step must return a tuple (observation, done)"),
    ("step", "result = 'over', True", "ok 1.0: "),
]


@pytest.mark.parametrize(("method", "code", "expected"), CASES)
def test_a_hostile_environment_ends_only_its_own_episodes(pools, capfd, method, code, expected):
    limit = [2.0] if "no answer" in expected else []  # seconds
    pool = pools("Steps") if method == "step" else pools("Hostile", *limit)
    for i in (0, 3):  # an episode of the other process, and one of the same process; each has one turn, its last one
        assert reset(pool, i, reward="result = self.turns") == Reply(messages=(), done=False, score=None)
    reply = reset(pool, 1, **{method: code})
    if method != "reset":
        assert reply == Reply(messages=(), done=False, score=None)
        reply = step(pool, 1, ACT if method == "act" else "the answer")
        assert reply.lost or reply.calls == (method == "act")
    result = outcome(reply)
    expected = expected.replace("CLASS.METHOD", f"{'Steps' if method == 'step' else 'Hostile'}.{method}")
    assert (result.startswith(expected) and result.isprintable()) if reply.done else result == expected
    assert [outcome(step(pool, i, last=True)) for i in (0, 3)] == ["ok 1.0: ", reply.lost or "ok 1.0: "]
    pool.end(1)
    assert capfd.readouterr() == ("", "")


MALFORMED = [
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "cannot be parsed as JSON"),
    ('<tool_call>{"name": "act", "arguments": {}}', "the end tag is missing"),
    (hermes("act", "{}"), '"arguments", which are an object'),
    (hermes("reward", {}), "no tool 'reward'; the tools are act, add"),
    (hermes("\ud800" * 1000, {}), "no tool"),
    (hermes("add", {"a": 1, "b": [2]}), "argument b: Input should be a valid integer"),
    (hermes("act", {"number": 1, "<|x|>": 2}), "argument <|x|>: Unexpected keyword argument"),
    (hermes("act", {"self": 1}), "argument self: Got multiple values"),
    (ACT * 20, "at most 16 calls"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_a_malformed_call_gives_an_error_to_the_model(tools, text, message):
    reset(tools, 0)
    reply = step(tools, 0, f"{hermes('add', {'a': '2', 'b': 3})} and {text}")
    good, *turns, bad = reply.messages  # A reply has at most 16 calls, of which `add` is the first.
    assert good == {"role": "tool", "name": "add", "content": "5"}
    assert [m["content"] for m in turns] == [f"turn {i + 1}" for i in range(16 - 1 if text == ACT * 20 else 0)]
    assert bad["content"].startswith("error: ")
    assert message in bad["content"]
    assert len(bad["content"]) < 300
    assert (reply.done, reply.calls, reply.malformed) == (False, len(reply.messages), 1)
    assert step(tools, 0, "done").score == ScoreResult(1.0, "ok")


def test_calls_that_wait_run_at_the_same_time_and_episodes_keep_their_state(tools):
    episodes = range(0, 64, 2)  # 32 episodes in one process. Their calls return after all of them have begun.
    for i in episodes:
        reset(tools, i, act=f"BARRIER.wait(); result = {100 * i} + self.turns")
    replies = queue.Queue()
    for turn in (1, 2):
        for i in episodes:
            tools.step(i, ACT, last=False, reply=lambda reply, i=i: replies.put((i, outcome(reply))))
        assert sorted(replies.get(timeout=60) for _ in episodes) == [(i, str(100 * i + turn)) for i in episodes]
    for i in episodes:
        tools.end(i)


def test_an_ended_episode_gets_no_reply_and_leaves_no_object(tools):
    replies = []
    reset(tools, 1, act="result = len(LIVE)")
    reset(tools, 3, act=WAIT)
    tools.step(3, ACT, last=False, reply=replies.append)
    tools.reset(5, {"metadata": {"reset": WAIT}}, replies.append)
    while outcome(step(tools, 1)) != "3":
        pass  # until the third environment lives: its reset has begun
    tools.end(3)
    tools.end(5)
    reset(tools, 7, act="BARRIER.abort()")
    step(tools, 7, last=True)
    while outcome(step(tools, 1)) != "1":
        pass  # until one environment lives: the calls that waited have returned
    tools.end(1)
    assert not replies


def test_a_closed_pool_has_no_processes_and_sends_no_reply():
    replies = []
    pool = EnvironmentPool(f"{FILE}:Hostile", workers=1, max_tool_seconds=60.0, format="hermes")
    pid = int(outcome(reset(pool, 0, reset="result = os.getpid()", act=HANG)))
    pool.step(0, ACT, last=False, reply=replies.append)
    pool.close()
    assert not psutil.pid_exists(pid)
    assert not replies
    with pytest.raises(RuntimeError, match="closed"):
        pool.step(0, ACT, last=False, reply=replies.append)


def test_a_class_runs_in_this_process():
    with closing(EnvironmentPool(Hostile, workers=1, max_tool_seconds=1.0, format="tags")) as pool:
        assert reset(pool, 0, reset="result = 'begin'").messages == ({"role": "user", "content": "begin"},)
        assert outcome(step(pool, 0, "<call>add: {}</call>")).startswith("error: add: argument a")
        assert outcome(step(pool, 0, "no call")) == "ok 1.0: "


def test_a_process_that_cannot_start_is_a_user_error(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module")
    with closing(EnvironmentPool(f"{tmp_path}/broken.py:Broken", workers=1, max_tool_seconds=5.0)) as pool:
        for i in range(3):
            assert "no_such_module" in reset(pool, i).lost
        with pytest.raises(UserError, match=r"broken\.py:Broken: its process cannot start: .*no_such_module"):
            reset(pool, 3)
