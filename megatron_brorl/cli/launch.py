"""Several processes on one machine without typing torchrun: torch's own launcher, with the ranks' exit code as ours."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from uuid import uuid4


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python -m megatron_brorl *arguments` as `processes` ranks; returns 0 or the first failing rank's code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # of this process alone: the ranks say themselves what is wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "megatron_brorl", *arguments)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"brorl: rank {rank} was ended by {name} (out of memory?)", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    except SignalException:
        return 75  # the ranks got the signal too and have saved
    return 0
