"""Runs agents: functions of a user that call the policy. Imports no torch, because workers import it.

A function receives those of the arguments row, client, base_url, api_key and model that it names. An async function
runs in an event loop that all agents of a process share, any other function in a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from megatron_brorl.environments.episodes import NO_ROW, Outcome
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import Judge
from megatron_brorl.user_functions import describe, import_function, source_sha256

ARGUMENTS = ("row", "client", "base_url", "api_key", "model")


class Agents:
    """The agents of a process by the number of their rollout."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = [name for name in ARGUMENTS if name in inspect.signature(function).parameters]
        self._is_async = inspect.iscoroutinefunction(function)
        self._client: Any = None
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        self._running: dict[int, Any] = {}

    def run(self, rollout: int, row: Mapping[str, Any], base_url: str, key: str, model: str, seconds: float) -> Outcome:
        """Run the function on a data row. Never raises.

        A returned text becomes the only message of the outcome, for the verifier of the row. The score is then None.
        """
        arguments = {"row": row, "base_url": base_url, "api_key": key, "model": model}
        try:
            if "client" in self._names:
                arguments["client"] = self._client_for(base_url, key)
            returned = self._function(**{name: arguments[name] for name in self._names})
            if self._is_async:
                task = asyncio.run_coroutine_threadsafe(asyncio.wait_for(returned, seconds), self._loop)
                self._running[rollout] = task
                returned = task.result()
        except asyncio.TimeoutError:
            reason = f"agent.max_seconds = {seconds:g} is reached"
            return Outcome([], done=True, score=["error", 0.0, reason, {}])
        except BaseException as e:  # includes SystemExit and CancelledError
            return Outcome([], done=True, score=["error", 0.0, describe(e, self._function), {}])
        finally:
            self._running.pop(rollout, None)
        if returned is None or isinstance(returned, str):
            messages = [] if returned is None else [{"role": "assistant", "content": returned}]
            return Outcome(messages, done=True, score=None)
        return Outcome([], done=True, score=Judge(lambda *_: returned)("", NO_ROW))  # Judge checks the score.

    def end(self, rollout: int) -> None:
        """Cancel an async agent. Any other agent ends with its next call, because its key has expired."""
        if task := self._running.get(rollout):
            task.cancel()

    def _client_for(self, base_url: str, key: str) -> Any:
        """Return a client with a key. All clients of a process share their connections."""
        import openai

        with self._lock:
            if self._client is None:
                # aiohttp needs less time per call than the client's default.
                http = openai.DefaultAioHttpClient()
                self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, http_client=http)
        return self._client.with_options(api_key=key, base_url=base_url)


def describe_agent(function: str | Callable[..., Any]) -> str:
    """Check a function, given as itself or as "my_agent.py:solve", and return the SHA-256 of its source.

    Raises UserError if it cannot be used.
    """
    if isinstance(function, str):
        label = f"agent.function = {function}"
        function, sha256 = import_function(function, "agent.function =")
    else:
        label = f"agent {getattr(function, '__name__', function)}"
        sha256 = source_sha256(function)
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [name for name in required if name not in ARGUMENTS]:
        raise UserError(f"{label}: the argument {unknown[0]} is not one of {', '.join(ARGUMENTS)}; give it a default")
    if "client" in required and not inspect.iscoroutinefunction(function):
        raise UserError(f"{label}: client is an AsyncOpenAI: define the function with async, or take base_url, api_key")
    if "client" in required:
        try:
            import aiohttp  # noqa: F401
            import openai  # noqa: F401
        except ImportError:
            raise UserError(f"{label}: client needs openai[aiohttp]: pip install 'megatron-brorl[agents]'") from None
    return sha256
