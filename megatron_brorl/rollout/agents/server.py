"""The endpoint of a rank: POST /v1/chat/completions and GET /v1/models on the loopback interface.

Each rollout has an API key of its own, which names it and expires with it. The server runs in a thread. Only this
thread uses the objects of a rollout until its key has expired.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.errors import UserError, warn
from megatron_brorl.rollout.agents.chat_api import BadRequest, ChatRequest, read_reply, read_request, response, stream
from megatron_brorl.rollout.agents.sequences import Call, Sequences
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.interaction import in_thought

MODEL = "policy"
_NO_RETRY = {"x-should-retry": "false"}
_warn_once = functools.cache(warn)


@dataclass(eq=False)
class Endpoint:
    """The endpoint of one rollout."""

    sequences: Sequences
    sampling: Sampling  # of the run or the evaluation
    submit: Callable[[Call], None]  # to the engine
    # Tasks of requests whose response has not been delivered, by the hash of the body.
    _pending: dict[bytes, asyncio.Task[tuple[Call, ChatRequest]]] = field(default_factory=dict)

    @property
    def used(self) -> dict[str, float]:
        """The sampling parameters that are used whatever a request asks for."""
        return {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}

    async def chat(self, body: bytes, is_retry: bool) -> tuple[Call, ChatRequest]:
        """Return the completed call of a request. A retry waits for the call of the same body. Raises BadRequest."""
        digest = hashlib.sha256(body).digest()
        if not is_retry or digest not in self._pending:
            self._pending[digest] = asyncio.ensure_future(self._complete(body))
        return await asyncio.shield(self._pending[digest])

    async def _complete(self, body: bytes) -> tuple[Call, ChatRequest]:
        try:
            request = read_request(json.loads(body))
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"the body cannot be parsed as JSON: {e}") from None
        chat, calls = self.sequences.chat, self.sequences.calls
        tools = request.tools if request.tool_choice == "auto" else []
        if tools and chat.format is None:
            raise BadRequest("tools: the chat template of the model does not read tools", "tools")
        if len(calls) >= chat.config.max_calls:
            raise BadRequest(f"agent.max_calls = {chat.config.max_calls} is reached", code="max_calls")
        asked = request.model_dump(include=set(self.used), exclude_none=True)
        if not asked.items() <= self.used.items():
            _warn_once(f"the agent asks for {asked}; the calls are sampled with {self.used}")
        try:
            call = self.sequences.begin(request.messages, tools)
        except UserError as e:
            raise BadRequest(str(e), "messages") from None
        try:
            call.limit = self._limit(call, request)
        except BadRequest:
            calls.remove(call)  # It has sampled nothing.
            raise

        done, loop = asyncio.Event(), asyncio.get_running_loop()
        call.stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        call.done = lambda: loop.call_soon_threadsafe(done.set)
        self.submit(call)
        await done.wait()
        if call.finish == "cut":
            raise BadRequest("the call of the engine has ended", code="cancelled")
        thinks = in_thought(chat.decode, call.prompt_ids)
        call.reply = read_reply(self._text(call), call, chat.format or "hermes", thinks)
        return call, request

    def _limit(self, call: Call, request: ChatRequest) -> int:
        """Return how many tokens a call may sample. Raises BadRequest if it may sample none."""
        chat, most = self.sequences.chat, self.sampling.max_tokens
        if len(call.prompt_ids) > chat.prompt_tokens:
            text = f"the messages have {len(call.prompt_ids)} tokens, more than {chat.prompt_tokens}"
            raise BadRequest(f"{text}, which leave room for a reply", "messages", code="context_length_exceeded")
        limit = min(most, request.max_completion_tokens or request.max_tokens or most)
        if chat.config.max_tokens:
            limit = min(limit, chat.config.max_tokens - sum(len(c.ids) for c in self.sequences.calls))
            if limit <= 0:
                raise BadRequest(f"agent.max_tokens = {chat.config.max_tokens} is reached", code="max_tokens")
        return limit

    def _text(self, call: Call) -> str:
        """Return the text of a completion without its stop token or stop string."""
        text = self.sequences.chat.decode(call.ids[: len(call.ids) - call.stopped].tolist())
        if call.finish == "stop" and not call.stopped:
            places = [text.find(stop) for stop in (*call.stop, *self.sampling.stop_strings) if stop in text]
            text = text[: min(places, default=len(text))]
        return text


class AgentServer:
    """The HTTP server of a rank, and the endpoints of its rollouts by their keys."""

    def __init__(self) -> None:
        """Raise UserError if starlette or uvicorn is missing."""
        try:
            import starlette  # noqa: F401
            import uvicorn
        except ImportError as e:
            raise UserError(f"agent.function needs {e.name}: pip install 'megatron-brorl[agents]'") from None
        self.endpoints: dict[str, Endpoint] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = _app(self.endpoints)
        options = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=600)
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()


def _app(endpoints: dict[str, Endpoint]) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def chat(request: Request) -> Response:
        endpoint = endpoints.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if endpoint is None:
            error = {"message": "the key is unknown, or its rollout has ended", "code": "invalid_api_key"}
            return JSONResponse({"error": error}, 401, _NO_RETRY)
        body = await request.body()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            call, asked = await endpoint.chat(body, is_retry)
        except asyncio.CancelledError:  # by AgentServer.close
            return JSONResponse({"error": {"message": "the run has ended"}}, 503, _NO_RETRY)
        except BadRequest as e:
            return JSONResponse(e.body, 400, _NO_RETRY)
        # A client that has gone may ask again. Without a retry, the call is not trained on.
        call.delivered = call.delivered or not await request.is_disconnected()
        texts = [endpoint.sequences.chat.decode([i]) for i in call.ids.tolist()] if asked.logprobs else []
        whole = response(call, asked, MODEL, texts, endpoint.used)
        if asked.stream:
            chunks = stream(whole, usage=bool(asked.stream_options.get("include_usage")))
            return StreamingResponse(chunks, media_type="text/event-stream")
        return JSONResponse(whole)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)])
