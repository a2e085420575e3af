"""The environment objects of a process, and calls of their methods. Imports no torch, because workers import it."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError, validate_call

from megatron_brorl.environments.calls import Call, MalformedCall, find_calls, keyword_arguments
from megatron_brorl.environments.interface import MAX_TEXT, Format, choices, tools
from megatron_brorl.rewards.verifier import Judge, printable
from megatron_brorl.user_functions import describe

_MAX_ERROR = 200  # characters of an error message to the model
NO_ROW: Any = {"answer": None}  # Without a reference answer, Judge calls a function only once.


class Outcome(NamedTuple):
    """The result of a call of an environment, of types that JSON has."""

    messages: list[dict[str, str]]  # [] if done
    done: bool
    score: list[Any] | None  # [status, reward, reason, parts] of a Judge; None unless done
    calls: int = 0
    malformed: int = 0


class Episodes:
    """Environments by the number of their episode. Any thread may call, but an episode has one call at a time."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._tools = {name: _checked(tool) for name, tool in tools(cls).items()}
        self._environments: dict[int, Any] = {}

    def reset(self, episode: int, row: Mapping[str, Any]) -> Outcome:
        """Create the environment of an episode and reset it. Never raises."""
        try:
            environment = self._environments[episode] = self._cls()
            observation = environment.reset(row)
            messages = [] if observation is None else [_message("user", observation)]
            return Outcome(messages, done=False, score=None)
        except BaseException as e:  # includes SystemExit
            return self._failed(episode, e, "reset")

    def step(self, episode: int, text: str, last: bool, format: Format, in_thought: bool = False) -> Outcome:
        """Pass a turn to the environment. Never raises. last: the episode ends with it. in_thought: see find_calls."""
        environment = self._environments[episode]
        has_step = hasattr(environment, "step")
        calls = [] if has_step else find_calls(text, format, in_thought)
        messages: list[dict[str, str]] = []
        malformed = 0
        method = "step" if has_step else "final"  # the method that runs, for the message of an error
        try:
            if has_step:
                returned = environment.step(text)
                if not isinstance(returned, tuple) or len(returned) != 2:
                    raise TypeError("step must return a tuple (observation, done)")
                messages.append(_message("user", returned[0]))
                done = bool(returned[1])
            else:
                done = not calls
                if done and hasattr(environment, "final"):
                    environment.final(text)
            for call in calls:
                method = call.name
                try:
                    name, result = call.name, self._execute(environment, call)
                except MalformedCall as e:
                    malformed += 1
                    name, result = "unknown", f"error: {str(e)[:_MAX_ERROR]}"
                messages.append(_message("tool", result, name))
            if not (done or last):
                return Outcome(messages, done=False, score=None, calls=len(calls), malformed=malformed)
            method = "reward"
            reward = environment.reward()
            score = Judge(lambda *_: reward)("", NO_ROW)  # Judge checks the reward.
        except BaseException as e:  # includes SystemExit
            return self._failed(episode, e, method)._replace(calls=len(calls), malformed=malformed)
        self.end(episode)
        return Outcome([], done=True, score=score, calls=len(calls), malformed=malformed)

    def end(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""
        self._environments.pop(episode, None)

    def _execute(self, environment: Any, call: Call) -> Any:
        """Call a tool and return its result. Raises MalformedCall."""
        if call.error:
            raise MalformedCall(call.error)
        if call.name not in self._tools:
            raise MalformedCall(f"no tool {call.name[:60]!r}; the tools are {', '.join(self._tools)}")
        tool = self._tools[call.name]
        arguments = keyword_arguments(call, tool)
        try:
            return tool(environment, **arguments)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:60]
            raise MalformedCall(f"{call.name}: argument {where}: {first['msg']}") from None

    def _failed(self, episode: int, error: BaseException, method: str) -> Outcome:
        self.end(episode)
        reason = f"{self._cls.__name__}.{method}: {describe(error, getattr(self._cls, method, None))}"
        return Outcome([], done=True, score=["error", 0.0, printable(reason), {}])


def _checked(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tool that checks its arguments: the type hints (raises ValidationError) and (choices: ...)."""
    allowed = choices(tool)
    parameters = inspect.signature(tool).parameters

    @functools.wraps(tool)
    def call(*args: Any, **named: Any) -> Any:
        for name, value in named.items():
            values = value if isinstance(value, list) else [value]
            is_given = value not in (None, parameters[name].default)
            if is_given and name in allowed and not all(v in allowed[name] for v in values):
                listed = json.dumps(allowed[name], ensure_ascii=False)
                raise MalformedCall(f"{tool.__name__}: argument {name} must be one of {listed}")
        return tool(*args, **named)

    return validate_call(call)


def _message(role: str, content: Any, name: str = "") -> dict[str, str]:
    """Return a chat message with the text of a result or observation."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[{len(text) - MAX_TEXT} more characters]"
    # Tokenizers raise on surrogates.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return {"role": role, "content": text, **({"name": name} if name else {})}
