"""Converts the calls of a rollout to token sequences.

A call repeats the conversation so far as messages. If these begin with the messages of an earlier call and its reply,
the call continues the tokens of that call, and only the new messages are tokenized. Log-probabilities thus stay those
of the engine. Every other call begins a sequence of its own, for example a summary of the history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.config.schema import AgentConfig
from megatron_brorl.environments.interface import Format
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import Spans, extend_spans
from megatron_brorl.types import FinishReason

Message = dict[str, Any]  # as in data.chat


@dataclass(frozen=True)
class Chat:
    """The conversations of a run: their limits, and the functions of the tokenizer that read and write them."""

    config: AgentConfig
    prompt_tokens: int  # most tokens of the messages of a call, which leave room for rollout.max_tokens
    format: Format | None  # of tool calls; None: the chat template reads no tools
    decode: Callable[[Sequence[int]], str]
    # (messages, tools) -> the ids of the prompt of a new sequence, see Tokenizer.apply_chat.
    render: Callable[[Sequence[Message], Sequence[Any]], list[int]]
    # (messages, tools, whether the reply ended with its stop token) -> the ids after it, see Tokenizer.continuation.
    proceed: Callable[[Sequence[Message], Sequence[Any], bool], list[int]]


@dataclass
class Call:
    """A call of a rollout. Its prompt and completion are the tokens of a sequence up to its end."""

    messages: list[Message]
    tools: Sequence[Any]
    prompt_ids: list[int]  # the whole context, with the tokens of earlier calls
    earlier: Call | None  # the call that it continues
    key: int  # of its random numbers
    # Set before the call is submitted.
    limit: int = 0  # most tokens of the completion
    stop: tuple[str, ...] = ()  # strings
    done: Callable[[], Any] = lambda: None  # called when the fields below are set or the call is withdrawn
    # Set when the completion is known.
    reply: Message = field(default_factory=dict)
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [G], sampled
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # [G]
    finish: FinishReason = "cut"
    stopped: bool = False  # whether the completion ends with a stop token
    version: int = 0  # of the weights
    delivered: bool = False  # whether the agent has received it


@dataclass
class Sequences:
    """The calls of one rollout in the order of their arrival."""

    chat: Chat
    key: int  # of the rollout
    calls: list[Call] = field(default_factory=list)

    def begin(self, messages: list[Message], tools: Sequence[Any]) -> Call:
        """Add a call and return it with its prompt. Raises UserError if the chat template refuses the messages."""
        candidates = [call for call in self.calls if call.reply and _continues(call, messages, tools)]
        earlier = max(candidates, key=lambda call: len(call.messages), default=None)
        earlier_ids = [*earlier.prompt_ids, *earlier.ids.tolist()] if earlier else []
        if earlier and self.chat.config.history == "keep":
            ids = earlier_ids + self.chat.proceed(messages[len(earlier.messages) + 1 :], tools, earlier.stopped)
        else:
            ids = self.chat.render(messages, tools)
            if ids[: len(earlier_ids)] != earlier_ids:  # for example because the template drops earlier thoughts
                earlier = None
        repeats = sum(call.prompt_ids == ids for call in self.calls)
        call = Call(messages, tools, ids, earlier, stream_key(self.key, repeats, *ids))
        self.calls.append(call)
        return call

    def rows(self) -> list[list[Call]]:
        """Return the calls of each sequence in order, without completions that the agent has not received.

        If two calls continue the same call, the second begins a sequence, in which earlier completions are a part
        of the prompt. The order depends on the tokens, not on the time at which calls arrive.
        """
        rows: list[list[Call]] = []
        ends: dict[int, list[Call]] = {}  # sequence by its last call
        delivered = [call for call in self.calls if call.delivered]
        for call in sorted(delivered, key=lambda call: (len(call.prompt_ids), call.prompt_ids, call.key)):
            row = ends.pop(id(call.earlier), [])
            if not row:
                rows.append(row)
            row.append(call)
            ends[id(call)] = row
        return rows


def tokens(rows: Sequence[Sequence[Call]]) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], Spans]:
    """Return ids [G] int64, log-probs [G], sampled [G] bool, starts and spans of Rollout and Episode for rows()."""
    ids, log_probs, sampled = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
    starts: list[int] = []
    spans: Spans = ()
    total = 0
    for row in rows:
        starts.append(total)
        length = 0
        for call in row:
            prompt = torch.tensor(call.prompt_ids[length:], dtype=torch.int64)  # the part after the previous completion
            ids += [prompt, call.ids]
            log_probs += [torch.zeros(len(prompt)), call.log_probs]
            sampled += [torch.zeros(len(prompt), dtype=torch.bool), torch.ones(len(call.ids), dtype=torch.bool)]
            spans = extend_spans(spans, call.version, len(prompt) + len(call.ids))
            length = len(call.prompt_ids) + len(call.ids)
        total += length
    return torch.cat(ids), torch.cat(log_probs), torch.cat(sampled), tuple(starts), spans


def canonical(message: Mapping[str, Any]) -> Message:
    """Return a message with the fields that a chat template reads. Null, empty and absent are the same.

    The parts of a content are joined, and the arguments of tool calls are parsed. Raises ValueError for a message that
    is not text.
    """
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r} is not one of system, developer, user, assistant and tool")
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        raise ValueError("content must be text, or parts of type text")
    text = "".join(str(part.get("text", "")) for part in parts)
    result: Message = {"role": "system" if role == "developer" else role, "content": text}
    if role == "assistant" and message.get("tool_calls"):
        result["tool_calls"] = [_canonical_call(call) for call in message["tool_calls"]]
    if role == "tool":
        result |= {key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)}
    return result


def _canonical_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = {**(json.loads(arguments) if isinstance(arguments, str) else arguments)}  # TypeError if no object
        function = {"name": str(function["name"]), "arguments": arguments}
        return {"id": str(call.get("id", "")), "type": "function", "function": function}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ValueError("tool_calls must be functions with a name and arguments, which are an object") from None


def _continues(call: Call, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
    """Return whether the messages begin with those of a call and its reply, and add no message of the assistant."""
    count = len(call.messages) + 1
    begins = call.tools == tools and messages[:count] == [*call.messages, call.reply]
    return begins and all(message["role"] != "assistant" for message in messages[count:])
