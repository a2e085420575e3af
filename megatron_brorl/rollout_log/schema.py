"""The columns of what a run records of its rollouts; docs/rollouts.md says what each of them means."""

from __future__ import annotations

import pyarrow as pa

# A row per group of a step, or per prompt of an evaluation.
GROUPS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("verifier", pa.string()),
        ("rollouts", pa.int32()),
        ("right", pa.int32()),
        ("distinct", pa.int32()),
        ("reward", pa.float32()),
        ("tokens", pa.float32()),
        ("outcome", pa.string()),
        ("trained", pa.bool_()),
        ("recorded", pa.int32()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
    ]
)

# A row per rollout that is recorded whole.
ROLLOUTS = pa.schema(
    [
        ("group", pa.int32()),
        ("prompt_id", pa.string()),
        ("sibling", pa.int32()),
        ("text", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float32()),
        ("right", pa.bool_()),
        ("score", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("reason", pa.string()),
        ("status", pa.string()),
        ("finish", pa.string()),
        ("tokens", pa.int32()),
        ("versions", pa.list_(pa.struct([("version", pa.int32()), ("tokens", pa.int32())]))),
        ("advantage", pa.float32()),
        ("token_ids", pa.list_(pa.int32())),
        ("log_probs", pa.list_(pa.float32())),
    ]
)
