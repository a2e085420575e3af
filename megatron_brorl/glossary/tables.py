"""All figures of a run: what the page of the documentation, `brorl metrics` and boards know of them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_brorl.glossary.form import Figure, Section
from megatron_brorl.glossary.sampling import EVALUATE, HANDED_ON, REWARD, ROLLOUTS, VERDICTS
from megatron_brorl.glossary.summary import SUMMARY
from megatron_brorl.glossary.theory import THEORY
from megatron_brorl.glossary.updates import CRITIC, ENGINE, POLICY, STEP
from megatron_brorl.glossary.wall_clock import KV_CACHE, RANKS, THROUGHPUT, TIME

# In the order of the page.
OF_A_STEP = (REWARD, EVALUATE, ROLLOUTS, VERDICTS, POLICY, ENGINE, CRITIC, STEP, THEORY)
OF_TIME = (TIME, HANDED_ON, RANKS, THROUGHPUT, KV_CACHE)
OF_A_RUN = (SUMMARY,)
SECTIONS = (*OF_A_STEP, *OF_TIME, *OF_A_RUN)


def find(name: str, sections: Sequence[Section]) -> tuple[Section, Figure] | None:
    """The figure that has this name, with its section; None where none of them has."""
    for section in sections:
        for figure in section.figures:
            if figure.pattern.fullmatch(name):
                return section, figure
    return None
