from __future__ import annotations

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry

BOTH = r"<answer>1</answer> \boxed{2}"


def test_an_unknown_name_gets_close_ones() -> None:
    with pytest.raises(UserError, match=r"^f:3: no verifier is called 'exakt'; did you mean exact\?"):
        registry.entry("exakt", "f:3")
    with pytest.raises(UserError, match=r"^f:3: no verifier is called ''; known: .*exact, .*reasoning_gym"):
        registry.entry("", "f:3")


def test_every_verifier_finds_its_own_answer() -> None:
    assert registry.entry("exact", "x").find(BOTH) == BOTH
    assert registry.entry("reasoning_gym", "x").find(BOTH) == "1"
    assert registry.entry("my.py:score", "x").find(BOTH) == BOTH


@pytest.mark.parametrize(("how", "answer"), [("full", BOTH), ("answer_tag", "1"), ("boxed", "2")])
def test_the_configuration_overrides_them_all(how: str, answer: str) -> None:
    for name in ("exact", "reasoning_gym", "my.py:score"):
        assert registry.entry(name, "x", RewardConfig(extract=how)).find(BOTH) == answer  # type: ignore[arg-type]


def test_the_smaller_limit_counts() -> None:
    assert registry.entry("reasoning_gym", "x").max_chars == 4096
    assert registry.entry("reasoning_gym", "x", RewardConfig(max_chars=5000)).max_chars == 4096
    assert registry.entry("reasoning_gym", "x", RewardConfig(max_chars=10)).max_chars == 10
    assert registry.entry("exact", "x").max_chars == registry.entry("my.py:score", "x").max_chars == 65536


def test_every_entry_says_what_it_is() -> None:
    for name, entry in registry.ENTRIES.items():
        assert entry.about, name
        assert "\n" not in entry.about
