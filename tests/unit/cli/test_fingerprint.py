"""What a resumed run is held to beside its configuration: the files of its user's own verifiers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_brorl.cli.fingerprint import BEFORE_THE_KEY, check_fingerprint, fingerprint
from megatron_brorl.config.describe import keys
from megatron_brorl.config.schema import Config, RolloutConfig
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape

WHERE = Path("runs/x/checkpoints/step_00000003")

FIRST_KEYS = {  # that checkpoints of every version know; a key that is younger says what runs did before it
    "data": "chat held_out held_out_prompts held_out_seed skip_bad_rows tasks template train train_seed",
    "rollout": "adaptive adaptive_first dtype engine max_carried_steps max_tokens n partial_tokens prompts refills "
    "stop_strings temperature top_k top_p",
    "reward": "cut_off_factor extract max_chars strict",
    "shaping": "cosine_coef cosine_max cosine_min cosine_off_steps cosine_on_steps overlong_tokens repetition_ngram "
    "repetition_penalty",
    "algo": "advantage aggregation aggregation_tokens correct_boost dual_clip dynamic_sampling entropy_coef epochs "
    "eps_high eps_low gamma is_cap kl_coef kl_estimator kl_in lam mini_batch_of mini_batches mismatch_high "
    "mismatch_low mismatch_mask old_log_probs overlong_filter ratio",
    "critic": "clip lr lr_warmup_steps warmup_steps",
    "reference": "reset_above_kl reset_every reset_optimizer reset_patience",
    "ops": "implementation",
    "optim": "betas clip_grad eps lr lr_for_rollouts warmup_steps weight_decay",
    "run": "seed",
}


def test_another_file_of_a_verifier_is_refused():
    saved = {"own_verifiers": {"mine.py:score": "a" * 64}}
    check_fingerprint(saved, {"own_verifiers": {"mine.py:score": "a" * 64}}, WHERE)
    with pytest.raises(UserError) as error:
        check_fingerprint(saved, {"own_verifiers": {"mine.py:score": "b" * 64}}, WHERE)
    assert str(error.value) == (
        f"{WHERE}: was written with another file of verifier mine.py:score (sha256 aaaaaaaaaaaa, now bbbbbbbbbbbb): "
        "put it back as it was, or start anew with another run.dir or train.resume=never"
    )


def test_checkpoints_from_before_these_keys_go_on():
    now = {"data": {"verifier": "exact"}, "reward": {"combination": []}, "own_verifiers": {}}
    check_fingerprint({"data": {}, "reward": {}}, now, WHERE)
    with pytest.raises(UserError, match=r"was written with data\.verifier = 'exact', now 'mine\.py:score'"):
        check_fingerprint({"data": {}, "reward": {}}, {**now, "data": {"verifier": "mine.py:score"}}, WHERE)


def test_a_key_says_what_runs_did_before_it():
    """A run of a version before the key goes on: with its default, or as BEFORE_THE_KEY has it."""
    shape = ModelShape(**{f.name: 1 for f in dataclasses.fields(ModelShape)})
    now = fingerprint(Config(rollout=RolloutConfig(refills=1)), shape, {})
    younger = {
        section: set(values) - set(FIRST_KEYS[section].split())
        for section, values in now.items()
        if section in FIRST_KEYS
    }
    assert {k: v for k, v in younger.items() if v} == {k: set(v) for k, v in BEFORE_THE_KEY.items()}


def test_rounds_of_another_size_are_another_run():
    """Checkpoints from before rounds were sized: those of runs without refills go on, the others must say so."""
    shape = ModelShape(**{f.name: 1 for f in dataclasses.fields(ModelShape)})
    for refills in (0, 4):
        config = Config(rollout=RolloutConfig(refills=refills))
        now = fingerprint(config, shape, {})
        saved = {**now, "rollout": {k: v for k, v in now["rollout"].items() if k != "max_oversample"}}
        if not refills:
            check_fingerprint(saved, now, WHERE)
            continue
        with pytest.raises(UserError, match=r"was written with rollout\.max_oversample = 1\.0, now 4\.0: set it back"):
            check_fingerprint(saved, now, WHERE)
        as_before = Config(rollout=RolloutConfig(refills=refills, max_oversample=1.0))
        check_fingerprint(saved, fingerprint(as_before, shape, {}), WHERE)


def test_other_rows_and_another_tokenizer_are_another_run():
    """Where the rows lie is no matter to a checkpoint that says what they are."""
    now = {"inputs": {"tokenizer": "a" * 64, "train": "b" * 64}, "data": {"train": ["here.jsonl"]}}
    check_fingerprint({**now, "data": {"train": ["there.jsonl"]}}, now, WHERE)
    for key, what in (("tokenizer", r"other tokenizer files in model\.path"), ("train", r"other rows of data\.train")):
        saved = {**now, "inputs": {**now["inputs"], key: "c" * 64}}
        with pytest.raises(UserError, match=what + r" \(sha256 cccccccccccc, now "):
            check_fingerprint(saved, now, WHERE)
    with pytest.raises(UserError, match=r"data\.train = \['there\.jsonl'\], now"):  # one from before there were hashes
        check_fingerprint({"data": {"train": ["there.jsonl"]}}, now, WHERE)


def test_what_may_change_is_not_in_it():
    shape = ModelShape(**{f.name: 1 for f in dataclasses.fields(ModelShape)})
    kept = fingerprint(Config(), shape, {})
    for path in ("rollout.max_num_seqs", "rollout.kv_cache_mib", "reward.workers", "rollout.timeout_s"):
        section, key = path.split(".")
        assert key not in kept[section]
        assert next(k for k in keys() if k.path == path).free
    assert {"n", "temperature"} <= kept["rollout"].keys()
