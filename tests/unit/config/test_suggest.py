"""An unknown key is answered by the one that was meant."""

from __future__ import annotations

import pytest

from megatron_brorl.config.describe import keys
from megatron_brorl.config.foreign import FOREIGN
from megatron_brorl.config.load import load
from megatron_brorl.config.suggest import suggestion
from megatron_brorl.errors import UserError


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("rollout.nn", "did you mean rollout.n?"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("rolout", "did you mean rollout?"),
        ("train.n", "did you mean rollout.n?"),  # of another section
        ("rollout.lr", "did you mean critic.lr or optim.lr or sft.lr?"),
        ("data.tasks[].wheight", "did you mean data.tasks[].weight?"),
        ("train.num_generations", "did you mean rollout.n? (TRL calls it num_generations)"),
        ("actor_rollout_ref.actor.clip_ratio_high", "did you mean algo.eps_high? (verl calls it clip_ratio_high)"),
        ("n_resp_per_prompt", "did you mean rollout.n? (verl calls it n_resp_per_prompt)"),
        ("grpo.num_prompts_per_step", "did you mean rollout.prompts? (NeMo RL calls it num_prompts_per_step)"),
        ("rollout.zebra", ""),
    ],
)
def test_what_was_meant(path, answer):
    assert suggestion(path) == answer


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[grpo]\nnum_generations_per_prompt = 8", [], "unknown key grpo; did you mean rollout.n? (NeMo RL calls"),
        (
            "[actor_rollout_ref.rollout]\nn_resp_per_prompt = 8",
            [],
            "unknown key actor_rollout_ref; did you mean rollout.n",
        ),
        ("", ["actor_rollout_ref.rollout.n=8"], "override 'actor_rollout_ref.rollout.n=8': did you mean rollout.n?"),
        ("", ["num_generations=8"], "override 'num_generations=8': did you mean rollout.n? (TRL calls it"),
        ("", ["rollout=3"], "override 'rollout=3': expected section.key=value"),
        ("[rollout]\nzebra = 1", [], "unknown key rollout.zebra; known here: n, prompts"),
    ],
)
def test_the_loader_says_so(tmp_path, text, overrides, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert message in str(caught.value)


def test_every_foreign_name_leads_to_a_key_and_is_none_itself():
    known = {key.path for key in keys()}
    assert [(name, key) for table in FOREIGN.values() for name, key in table.items() if key not in known] == []
    own = {path.rpartition(".")[2] for path in known}
    assert own & {name for table in FOREIGN.values() for name in table} == set()
