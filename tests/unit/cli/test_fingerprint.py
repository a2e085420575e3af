"""What a resumed run is held to beside its configuration: the files of its user's own verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_brorl.cli.fingerprint import check_fingerprint
from megatron_brorl.errors import UserError

WHERE = Path("runs/x/checkpoints/step_00000003")


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
