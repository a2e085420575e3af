"""The configuration: strict, overridable, and every shipped TOML file loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_brorl.config.data_keys import TaskConfig
from megatron_brorl.config.load import load
from megatron_brorl.config.renamed import RENAMED
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError

REPOSITORY = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_then_overrides(tmp_path):
    path = write(tmp_path, "[rollout]\nn = 64\ntemperature = 1\n[optim]\nbetas = [0.9, 0.95]\n")
    config = load(path, ["rollout.n=512", "model.path=/some/where", "train.resume=never", "optim.lr=3e-4"])
    assert config.rollout.n == 512
    assert config.rollout.temperature == 1.0
    assert type(config.rollout.temperature) is float
    assert config.optim.betas == (0.9, 0.95)
    assert config.optim.lr == 3e-4
    assert config.model.path == "/some/where"
    assert config.train.resume == "never"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[rolout]\nn = 4", [], "unknown key rolout; did you mean rollout?"),
        ("[rollout]\nm = 4", [], "unknown key rollout.m; known here: n, prompts"),
        ("", ["rollout.m=4"], "unknown key rollout.m"),
        ("[rollout]\nn = 'four'", [], "rollout.n = 'four': must be of type int"),
        ("[rollout]\nn = true", [], "rollout.n = True: must be of type int"),
        ("[rollout]\nn = 1", [], "rollout.n = 1: a group baseline needs at least 2 rollouts per prompt"),
        ("[rollout]\nengine = 'tgi'", [], "rollout.engine = 'tgi': must be one of 'torch'"),
        ("[optim]\nbetas = [0.9]", [], "optim.betas = [0.9]: must have 2 values"),
        ("[optim]\nlr = nan", [], "optim.lr = nan: must be finite"),
        ("", ["sft.lr=inf"], "sft.lr = inf: must be finite"),
        ("[algo]\neps_high = -inf", [], "algo.eps_high = -inf: must be finite"),
        ("[optim]\nbetas = [0.9, nan]", [], "optim.betas[1] = nan: must be finite"),
        ("[optim]\nlr = 1e999", [], "optim.lr = inf: must be finite"),
        ("[optim]\neps = 1e300", [], "optim.eps = 1e+300: must be finite, and within +-1e+30"),
        (f"[optim]\nlr = 1{'0' * 400}", [], "...: must be finite"),
        ("[[data.tasks]]\nname = 'gcd'\nweight = inf", [], "data.tasks[0].weight = inf: must be finite"),
        ("[train]\nmax_nonfinite_steps = 0", [], "train.max_nonfinite_steps = 0: must be at least 1"),
        ("[data]\ntrain = 'a.jsonl'", [], "data.train = 'a.jsonl': must be a list"),
        ("[[data.tasks]]\nweight = 2", [], "data.tasks[0].name is missing"),
        ("[[data.tasks]]\nname = 'gcd'\nwheight = 2", [], "unknown key data.tasks[0].wheight"),
        (
            "[data]\ntrain = ['a']\nmixture = [{files = ['b'], weight = 1}]",
            [],
            "give either data.train or data.mixture",
        ),
        ("[data]\nmixture = [{files = ['b']}]", [], "data.mixture[0].weight is missing"),
        ("[data]\nsystem_prompt = 'x'", [], "data.system_prompt = 'x': is a message of a chat: needs data.chat = true"),
        ("[data]\ntrain_seed = 2", [], "data.held_out_seed = 2: must differ from data.train_seed"),
        ("[parallel]\nsequence = true", [], "parallel.sequence = True: sequence parallelism needs parallel.tensor > 1"),
        ("[parallel]\ncontext = 0", [], "parallel.context = 0: must be at least 1"),
        ("[parallel]\ncontext = 2", [], "train.share_prompt = True: parallel.context > 1 cuts sequences"),
        (
            "[parallel]\ncontext = 2\n[train]\nshare_prompt = false\n[algo]\nratio = 'sequence'",
            [],
            "algo.ratio = 'sequence': parallel.context > 1 puts the tokens of a sequence on several ranks",
        ),
        (
            "[parallel]\noverlap_param_gather = true",
            [],
            "parallel.overlap_param_gather = True: weights are gathered with parallel.distributed_optimizer = true",
        ),
        ("[algo]\nmini_batches = 9\n[rollout]\nprompts = 8", [], "algo.mini_batches = 9: cannot cut 8 prompts"),
        (
            "[algo]\nmini_batches = 9\nmini_batch_of = 'siblings'\n[rollout]\nn = 8",
            [],
            "algo.mini_batches = 9: cannot cut 8 siblings",
        ),
        ("[rollout]\ntimeout_s = 0", [], "rollout.timeout_s = 0.0: must be above 0"),
        ("[rollout]\ntimeout_s = inf", [], "rollout.timeout_s = inf: must be finite"),
        ("[rollout]\nmax_lost_share = 1.5", [], "rollout.max_lost_share = 1.5: must be in [0, 1]"),
        ("[rollout]\nmost_lost = 0.5", [], "rollout.most_lost is now called rollout.max_lost_share; rename it"),
        ("", ["rollout.most_carried=3"], "rollout.most_carried is now called rollout.max_carried_steps; rename it"),
        ("[train]\nstalls = 3", [], "train.stalls is now called train.patience; rename it"),
        (
            "[[data.tasks]]\nname = 'gcd'\nkeep = ''",
            [],
            "data.tasks[0].keep is now called data.tasks[0].prompt_regex; rename it",
        ),
        ("[rollout]\ntop_p = 0", [], "rollout.top_p = 0.0: must be in (0, 1]"),
        ("[optim]\nbetas = [0.9, 1.0]", [], "optim.betas = (0.9, 1.0): must be in [0, 1)"),
        ("", ["engine.heartbeat_timeout_s=4"], "heartbeat_timeout_s = 4.0: must be at least 5: an engine process"),
        ("[rollout]\ntemperature = 0", [], "rollout.temperature = 0.0: must be above 0 (sampling needs randomness)"),
        (
            "[train]\nkeep_best = 'pass_at_1'",
            [],
            "train.keep_best = 'pass_at_1': no step is evaluated with evaluate.every",
        ),
        ("[theory]\nprompts = 0", [], "theory.prompts = 0: must be at least 1"),
        (
            "[algo]\nadvantage = 'maxrl'\n[reward]\nstrict = true\n[shaping]\noverlong_tokens = 10",
            [],
            "algo.advantage = 'maxrl': needs rewards of 0 and 1, which [shaping] changes",
        ),
        ("[algo]\nadvantage = 'maxrl'", [], 'reward.strict = False: algo.advantage = "maxrl" needs rewards of 0 and 1'),
        ("[algo]\nadvantage = 'pass_at_k'\npass_k = 8", [], 'reward.strict = False: algo.advantage = "pass_at_k"'),
        (
            "[algo]\nadvantage = 'maxrl'\n[reward]\nstrict = true\ncut_off_factor = 0.5",
            [],
            'reward.cut_off_factor = 0.5: algo.advantage = "maxrl" needs rewards of 0 and 1',
        ),
        ("[reward]\ncorrect_at = nan", [], "reward.correct_at = nan: must be finite"),
        ("[algo]\nadvantage = 'pass_at_k'", [], "algo.pass_k = 0: must be in [1, rollout.n - 1 = 511]"),
        ("[algo]\nadvantage = 'pass_at_k'\npass_k = 8\n[rollout]\nn = 8", [], "algo.pass_k = 8: must be in [1, roll"),
        ("[algo]\npass_k = 8", [], 'algo.pass_k = 8: of algo.advantage = "pass_at_k": must be 0'),
        ("[rollout]\npartial_tokens = -1", [], "rollout.partial_tokens = -1: must not be negative"),
        (
            "[rollout]\npartial_tokens = 100\nmax_tokens = 1001\nmax_carried_steps = 9",
            [],
            "rollout.max_carried_steps = 9: a response of rollout.max_tokens = 1001 at 100 tokens per step "
            "(rollout.partial_tokens) is carried over 10 steps",
        ),
        (
            "[rollout]\npartial_tokens = 512\n[algo]\nold_log_probs = 'rollout'",
            [],
            "algo.old_log_probs = 'rollout': partial rollouts (rollout.partial_tokens) come from older weights",
        ),
        (
            "[rollout]\nn = 1\n[algo]\nadvantage = 'gae'",
            [],
            "rollout.n = 1: a group baseline needs at least 2 rollouts",
        ),
        ("[algo]\ngamma = 0.9", [], 'algo.gamma = 0.9: only algo.advantage = "gae" discounts: must be 1'),
        ("[algo]\nadvantage = 'gae'\nlam = 1.1", [], "algo.lam = 1.1: must be in [0, 1]"),
        ("[critic]\nclip = -1", [], "critic.clip = -1.0: must not be negative"),
        ("[reward]\ncut_off_factor = 1.5", [], "reward.cut_off_factor = 1.5: must be in [0, 1]"),
        ("[shaping]\noverlong_tokens = 2000", [], "shaping.overlong_tokens = 2000: a response has rollout.max_tokens"),
        ("[algo]\npolicy_loss = 'cispo'\ndual_clip = 3", [], 'algo.dual_clip = 3.0: algo.policy_loss = "cispo" has no'),
        ("[algo]\ntau_neg = 0", [], "algo.tau_neg = 0.0: must be above 0"),
        ("[algo]\nmismatch_low = 6", [], "algo.mismatch_high = 5.0: must be above mismatch_low = 6.0"),
        (
            "[algo]\nmismatch_mask = 'token'\nold_log_probs = 'rollout'",
            [],
            "algo.mismatch_mask = 'token': algo.old_log_probs = \"rollout\" takes the engine for the trainer",
        ),
        ("[reference]\nreset_every = 3", [], "reference.reset_every = 3: without algo.kl_coef there is no reference"),
        ("[rollout]\nrefills = 1\npartial_tokens = 512", [], "rollout.refills = 1: needs algo.dynamic_sampling"),
        ("", ["run.dir="], "run.dir = '': results need a folder; the working directory is '.'"),
        ("rollout = 3", [], "rollout must be a table"),
        ("[rollout", [], "not valid TOML"),
        ("", ["rollout=3"], "override 'rollout=3': expected section.key=value"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, overrides, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or "override" in str(caught.value)


def test_a_critic_needs_no_siblings(tmp_path):
    path = write(tmp_path, "[rollout]\nn = 1\n[algo]\nadvantage = 'gae'\ndynamic_sampling = false\ngamma = 0.9\n")
    assert load(path).rollout.n == 1


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: no such configuration file"):
        load(tmp_path / "none.toml")


def test_every_shipped_file_loads():
    files = sorted(REPOSITORY.glob("examples/**/*.toml"))
    assert files
    for path in files:
        load(path)


def test_every_old_key_leads_to_one_that_exists():
    for old, new in RENAMED.items():
        section = old.split(".")[0]
        kind = TaskConfig if old.startswith("data.tasks.") else type(getattr(Config(), section))
        names = {f.name for f in dataclasses.fields(kind)}
        assert new in names, old
        assert old.split(".")[-1] not in names, old


def test_siblings_are_cut_whatever_the_number_of_prompts(tmp_path):
    text = "[algo]\nmini_batches = 8\nmini_batch_of = 'siblings'\n[rollout]\nprompts = 4\nn = 512"
    assert load(write(tmp_path, text)).algo.mini_batches == 8
