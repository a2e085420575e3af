"""A verifier behind an address, against a server of the standard library on loopback."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry, service
from megatron_brorl.rewards.pool import RewardPool, ScoreRequest, Verdict
from megatron_brorl.rewards.startup import look_at
from megatron_brorl.rewards.verifier import Score, VerifierRow
from megatron_brorl.types import Prompt

ROW = VerifierRow(id="r", prompt="?", answer="3", metadata={"n": 1})


def reward_of(response: str) -> object:
    return len(response) / 10 if len(response) < 11 else "much"


class Handler(http.server.BaseHTTPRequestHandler):
    """Half the length of a response over ten; paths misbehave."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.batches.append(body["items"])
        scores: Any = [{"reward": reward_of(i["response"]), "reason": i["row"]["id"]} for i in body["items"]]
        status = 200
        if self.path == "/flaky" and len(server.batches) < 3:
            status = 503
        if self.path == "/gone":
            status = 404
        if self.path == "/few":
            scores = scores[1:]
        if self.path == "/hang":
            time.sleep(1.5)
        reply = b"[" if self.path == "/text" else json.dumps({"scores": scores}).encode()
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # who asked has given up
            self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Tests read stderr."""


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.batches = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_answers_go_in_batches_and_come_back_as_verdicts(server: Any) -> None:
    url = f"{server.url}/score"
    prompt = Prompt("row7", "text", (1,), "4", url, {"n": 2})
    stand_ins = registry.for_workers([url], RewardConfig(timeout_s=20.0))
    with RewardPool(1, 20.0, stand_ins=stand_ins, impure=frozenset([url])) as pool:
        verdicts = pool.score([ScoreRequest(prompt, "a" * n) for n in (1, 3, 11, 3) * 10])
    assert verdicts[:2] == [Verdict(0.1, "ok"), Verdict(0.3, "ok")]
    assert [v.reason for v in verdicts[:4]] == [
        "row7",
        "row7",
        "returned 'much' for a reward, not a finite number (1e+30 at most)",
        "row7",
    ]
    assert verdicts[2:4] == [Verdict(0.0, "invalid"), Verdict(0.3, "ok")]
    assert verdicts == verdicts[:4] * 10
    assert len(server.batches) < 40  # what has gathered while a batch was judged goes as one
    row = {"id": "row7", "prompt": "text", "answer": "4", "metadata": {"n": 2}}
    assert [item for batch in server.batches for item in batch] == [
        {"response": "a" * n, "row": row} for n in (1, 3, 11, 3) * 10
    ]


def test_a_service_that_comes_back_is_asked_again(server: Any) -> None:
    assert service.Service(f"{server.url}/flaky", 10.0)("abc", ROW) == Score(0.3, "r")
    assert len(server.batches) == 3


@pytest.mark.parametrize(
    ("path", "why", "asked"),
    [
        ("/gone", "the service cannot be reached: HTTP status 404", 1),
        ("/few", 'the service did not reply {"scores": [...]} with 2 scores', 1),
        ("/text", 'the service did not reply {"scores": [...]} with 2 scores', 1),
        ("/hang", "the service cannot be reached: timed out", 1),
    ],
)
def test_without_scores_every_answer_says_why(server: Any, path: str, why: str, asked: int) -> None:
    returned = service.Service(server.url + path, 1.0).many([("a", ROW), ("b", ROW)])
    assert [str(e) for e in returned] == [why, why]
    assert len(server.batches) == asked


def test_a_service_is_reached_before_the_run(server: Any) -> None:
    look_at([f"{server.url}/score"], RewardConfig())
    assert server.batches == [[]]
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError) as error:
        look_at([f"{server.url}/score"], RewardConfig())
    assert str(error.value) == (
        f"verifier {server.url}/score: the service cannot be reached: [Errno 111] Connection refused; "
        "start the service, or mend the address"
    )


def test_an_address_is_a_verifier() -> None:
    assert registry.entry("https://judge.example/score", "f:1").pure is False
    with pytest.raises(UserError, match="no verifier is called 'ftp://judge'"):
        registry.entry("ftp://judge", "f:1")
