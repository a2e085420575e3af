"""The main module of a process of environments or agents. Its arguments are KIND NAME MEMORY_MB PARENT_PID.

KIND is Episodes or Agents, and NAME the user's class or function. The parent sends (number of the call, method,
arguments) as pickles. Each call but `end` runs in a thread of its own, so that it may wait, and returns [number,
Outcome] as a line of JSON. The process never imports torch.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from megatron_brorl.environments.agents import Agents
from megatron_brorl.environments.episodes import Episodes
from megatron_brorl.rewards.worker_main import READY, isolate, json_line, silence_stderr
from megatron_brorl.user_functions import import_function


def main(kind: str, name: str, memory_mb: int, parent: int) -> None:
    """Run calls from standard input until the parent closes it."""
    messages, results = isolate(memory_mb, parent)
    kinds: dict[str, Callable[[Any], Any]] = {"Episodes": Episodes, "Agents": Agents}
    episodes = kinds[kind](import_function(name, kind)[0])
    silence_stderr()
    results.write(json_line(READY))
    pid = os.getpid()
    one_writer = threading.Lock()

    def run(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        outcome = getattr(episodes, method)(*arguments)
        if os.getpid() != pid:
            os._exit(0)  # The environment has forked, and only the parent of the fork replies.
        try:
            with one_writer:
                results.write(json_line([number, outcome]))
        except OSError:
            os._exit(1)  # The environment has closed the pipe.

    try:
        while messages.peek(1):
            number, method, arguments = pickle.load(messages)
            if method == "end":
                episodes.end(*arguments)
            else:
                threading.Thread(target=run, args=(number, method, arguments), daemon=True).start()
    finally:
        os._exit(1)  # A normal exit would wait for threads of environments, or abort because of them.


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
