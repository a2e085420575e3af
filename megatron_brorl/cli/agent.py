"""The agent of a run: the checks before the start, the engine with agents, and the trial of a dry run."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.config.schema import Config
from megatron_brorl.data.chat import Message
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.environments.agents import Agents, describe_agent
from megatron_brorl.environments.interface import Format
from megatron_brorl.environments.pool import EnvironmentPool
from megatron_brorl.errors import warn
from megatron_brorl.rollout.agents.agent_engine import GRACE_S, AgentEngine, FixedText
from megatron_brorl.rollout.agents.sequences import Chat
from megatron_brorl.rollout.engine import Request, RolloutEngine, Sampling
from megatron_brorl.rollout_log import one_line
from megatron_brorl.types import Prompt

_TEXT = "0"  # the completion of every call in a trial
_PROBE_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Agent:
    """A function that solves rows with calls of the policy."""

    config: Config
    function: str | Callable[..., Any]
    sha256: str
    tokenizer: Tokenizer
    format: Format | None  # of tool calls; None: the chat template reads no tools

    @staticmethod
    def of(config: Config, function: Callable[..., Any] | None, tokenizer: Tokenizer) -> Agent | None:
        """Return the agent of a run, or None without one. function: replaces agent.function.

        Raises UserError if the function cannot be used, or if the chat template cannot continue a conversation.
        """
        if not config.agent.function:
            return None
        sha256 = describe_agent(function or config.agent.function)
        variables = config.data.chat_template_kwargs
        tokenizer.continuation([{"role": "user", "content": "x"}], chat=True, variables=variables)  # may raise
        call_format = None
        if tokenizer.template_reads("tools", [_PROBE_TOOL]):
            call_format = tokenizer.call_format({**variables, "tools": [_PROBE_TOOL]})
        return Agent(config, function or config.agent.function, sha256, tokenizer, call_format)

    def __str__(self) -> str:
        tools = f"tool calls in format {self.format}" if self.format else "a chat template without tools"
        return f"{self.config.agent.function}, {tools}"

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the token ids of the prompt of a sequence."""
        return self.tokenizer.apply_chat(messages, self._variables(tools))[1]

    def proceed(self, messages: Sequence[Message], tools: Sequence[Any], after_stop: bool) -> list[int]:
        """Return the tokens between two replies: the stop token of the first unless after_stop, and the messages."""
        return self.tokenizer.continuation(messages, chat=True, variables=self._variables(tools), after_stop=after_stop)

    def _variables(self, tools: Sequence[Any]) -> dict[str, Any]:
        return {**self.config.data.chat_template_kwargs, **({"tools": list(tools)} if tools else {})}

    def engine(self, engine: RolloutEngine, context: int) -> AgentEngine:
        """Return the engine whose rollouts are runs of the agent. context: tokens of a sequence."""
        config = self.config.agent
        prompt_tokens = context - self.config.rollout.max_tokens
        chat = Chat(config, prompt_tokens, self.format, self.tokenizer.decode, self.render, self.proceed)
        pool = EnvironmentPool(self.function, self.config.reward.workers, config.max_seconds + GRACE_S, kind=Agents)
        return AgentEngine(engine, pool, chat)

    def trial(self, prompt: Prompt, sampling: Sampling, context: int) -> str:
        """Run the agent on a prompt, with the same text as every completion, and return the result in words.

        Prints a warning if the agent fails on this text, which need not be a mistake.
        """
        fixed = FixedText([*self.tokenizer.encode(_TEXT), self.tokenizer.eos_id])
        with contextlib.closing(self.engine(typing.cast(RolloutEngine, fixed), context)) as engine:
            ((rollout,),) = engine.generate([Request(prompt, key=0, n=1)], sampling)
        episode = rollout.episode
        assert episode is not None
        result = f"{episode.turns} calls on row {prompt.id}, each answered with {_TEXT!r}"
        if episode.score is None:
            return f"{result}; verifier {prompt.verifier} scores {one_line(episode.text or '', max_chars=60)!r}"
        if episode.score.status != "ok":
            warn(f"{self.config.agent.function}: {result}: {episode.score.reason}")
        return f"{result}; score {episode.score.reward:g}"
