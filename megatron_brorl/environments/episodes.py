"""The environment objects of a process, and calls of their methods. Imports no torch, because workers import it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError, validate_call

from megatron_brorl.environments.calls import MAX_CALLS, Call, MalformedCall, find_calls, keyword_arguments
from megatron_brorl.environments.interface import MAX_TEXT, Format, tools
from megatron_brorl.rewards.verifier import Judge, describe_error

_MAX_ERROR = 200  # characters of an error message to the model


class Outcome(NamedTuple):
    """The result of a call of an environment, of types that JSON has."""

    messages: list[dict[str, str]]  # [] if done
    done: bool
    score: list[Any] | None  # as Judge returns it; None unless done
    calls: int = 0
    malformed: int = 0


class Episodes:
    """Environments by the number of their episode. Any thread may call, one at a time per episode."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        # The wrappers raise ValidationError unless the arguments fit the type hints.
        self._tools = {name: validate_call(tool) for name, tool in tools(cls).items()}
        self._environments: dict[int, Any] = {}

    def reset(self, episode: int, row: Mapping[str, Any]) -> Outcome:
        """Create the environment of an episode and reset it. Never raises."""
        try:
            environment = self._environments[episode] = self._cls()
            observation = environment.reset(row)
            return Outcome([] if observation is None else [_message("user", observation)], False, None)
        except BaseException as e:  # includes SystemExit
            return self._failed(episode, e)

    def step(self, episode: int, text: str, last: bool, format: Format) -> Outcome:
        """Pass a turn of the model to the environment. Never raises.

        last: the episode ends after this turn.
        """
        turn = _Turn(self._environments[episode], self._tools, text, format)
        try:
            done = turn.run() or last
            score = Judge(lambda *_: turn.environment.reward())("", _NO_ROW) if done else None
        except BaseException as e:  # includes SystemExit
            return self._failed(episode, e)._replace(calls=turn.calls, malformed=turn.malformed)
        if done:
            self.end(episode)
        return Outcome([] if done else turn.messages, done, score, turn.calls, turn.malformed)

    def end(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""
        self._environments.pop(episode, None)

    def _failed(self, episode: int, error: BaseException) -> Outcome:
        self.end(episode)
        return Outcome([], True, ["error", 0.0, describe_error(error), {}])


class _Turn:
    """A turn of the model and its effect on an environment."""

    def __init__(self, environment: Any, tools: Mapping[str, Callable[..., Any]], text: str, format: Format) -> None:
        self.environment = environment
        self.tools = tools
        self.text = text
        self.format = format
        self.messages: list[dict[str, str]] = []
        self.calls = 0
        self.malformed = 0

    def run(self) -> bool:
        """Call `step`, the tools or `final`. Return whether the episode is done."""
        if hasattr(self.environment, "step"):
            returned = self.environment.step(self.text)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError("step must return a tuple (observation, done)")
            self.messages.append(_message("user", returned[0]))
            return bool(returned[1])

        calls = find_calls(self.text, self.format)
        if not calls:
            if hasattr(self.environment, "final"):
                self.environment.final(self.text)
            return True
        self.calls = len(calls)
        if len(calls) > MAX_CALLS:
            self.malformed = len(calls)
            error = f"error: {len(calls)} calls in one turn, at most {MAX_CALLS} are allowed; none was executed"
            self.messages.append(_message("tool", error, "unknown"))
            return False
        for call in calls:
            try:
                name, result = call.name, self._execute(call)
            except MalformedCall as e:
                self.malformed += 1
                name, result = "unknown", f"error: {str(e)[:_MAX_ERROR]}"
            self.messages.append(_message("tool", result, name))
        return False

    def _execute(self, call: Call) -> Any:
        """Call a tool and return its result. Raises MalformedCall."""
        if call.error:
            raise MalformedCall(call.error)
        if call.name not in self.tools:
            raise MalformedCall(f"no tool {call.name[:60]!r}; the tools are {', '.join(self.tools)}")
        tool = self.tools[call.name]
        arguments = keyword_arguments(call, tool)
        try:
            return tool(self.environment, **arguments)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:60]
            raise MalformedCall(f"{call.name}: argument {where}: {first['msg']}") from None


_NO_ROW: Any = {"answer": None}  # Judge does not call `reward` again without a reference answer.


def _message(role: str, content: Any, name: str = "") -> dict[str, str]:
    """Return a chat message with the text of a result or observation."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[{len(text) - MAX_TEXT} more characters]"
    # Tokenizers raise on surrogates.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return {"role": role, "content": text, **({"name": name} if name else {})}
