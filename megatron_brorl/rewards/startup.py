"""Before a run begins: its user's own verifiers, imported in a scoring process and looked at.

`python -m megatron_brorl.rewards.startup NAME...` is that process. It prints what own.inspected found as JSON, or ends
with one line on stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import own, registry
from megatron_brorl.rewards.process import environment
from megatron_brorl.rewards.sandbox import isolation, probe

_START_S = 120.0  # for the imports
_MISTAKE = 2  # exit status after a UserError


@dataclass(frozen=True)
class Started:
    """What a run knows of its verifiers once they were looked at."""

    sha256: Mapping[str, str] = field(default_factory=dict)  # of the file of each verifier of the user's own
    impure: frozenset[str] = frozenset()  # verifiers that judge equal answers one by one
    unsandboxed: bool = False  # programs of the model run without isolation


def look_at(names: Iterable[str], config: RewardConfig) -> Started:
    """Check the verifiers that a run's rows name. Raises UserError for an own one that cannot be used."""
    names = sorted(set(names))
    # Where programs of the model would run, tried now rather than at the first of them.
    isolation.tell_workers(config.unsandboxed, config.timeout_s)
    executing = [name for name in names if registry.entry(name, "verifier", config).executes]
    if executing and not config.unsandboxed:
        reason = probe.problem_seen_from(environment())
        if reason:
            raise probe.refuse(f"verifier {executing[0]!r}", reason)

    # The user's own code, in a process of its own.
    places = [name for name in names if name not in registry.ENTRIES]
    sources = _inspected(places) if places else {}
    impure = frozenset(name for name, source in sources.items() if not source.pure)
    bare = bool(executing) and config.unsandboxed
    return Started({name: source.sha256 for name, source in sources.items()}, impure, bare)


def _inspected(places: list[str]) -> dict[str, own.Source]:
    """own.inspected of each place, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_brorl.rewards.startup", *places],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment(),
            timeout=_START_S,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for the trainer
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"verifier {' or '.join(places)}: not imported in {_START_S:.0f} s; make it lighter") from None

    # Its last line is what the user can mend, or all that is known of a crash.
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(last if done.returncode == _MISTAKE else f"verifier {' or '.join(places)}: {last}")
    return {place: own.Source(*found) for place, found in json.loads(done.stdout).items()}


def main(places: list[str]) -> int:
    """Inspect the places and print what was found."""
    # Modules may print while they are imported.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        found = {place: own.inspected(place) for place in places}
    except UserError as e:
        print(f"\n{e}", file=sys.stderr)
        return _MISTAKE
    os.write(out, json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
