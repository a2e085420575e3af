"""Keys that once had another name, for the message about an unknown key."""

from __future__ import annotations

RENAMED = {  # section.key before -> key now; a list of tables counts as a section
    "critic.steps_alone": "warmup_steps",
    "data.tasks.keep": "prompt_regex",
    "reference.reset_after_stalls": "reset_patience",
    "rollout.max_rows": "max_num_seqs",
    "rollout.memory_mib": "kv_cache_mib",
    "rollout.most_lost": "max_lost_share",
    "rollout.most_carried": "max_carried_steps",
    "shaping.cosine_off": "cosine_off_steps",
    "shaping.cosine_on": "cosine_on_steps",
    "theory.depth": "max_position",
    "train.seconds": "max_seconds",
    "train.stall_margin": "min_delta",
    "train.stalls": "patience",
}
