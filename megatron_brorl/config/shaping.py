"""Section [shaping]."""

from __future__ import annotations

from megatron_brorl.config.section import key, section


@section
class ShapingConfig:
    """Terms that are added to rewards before advantages are computed. Groups are selected by the unshaped rewards."""

    overlong_tokens: int = key(
        0,
        "Tokens below rollout.max_tokens over which a length penalty grows linearly from 0 to 1. 0 disables it.",
        ge=0,
    )
    cosine_coef: float = key(
        0.0,
        "Coefficient of the length reward of a correct response with t tokens, cosine_min + (cosine_max - "
        "cosine_min) (1 + cos(pi t / rollout.max_tokens)) / 2.",
    )
    cosine_min: float = key(-0.5, "Length reward of the longest possible response.")
    cosine_max: float = key(0.0, "Length reward of the shortest possible response.")
    cosine_on_steps: int = key(100, "Consecutive steps with the length reward.", ge=0)
    cosine_off_steps: int = key(500, "Steps without the length reward after these. 0 always applies it.", ge=0)
    repetition_ngram: int = key(0, "Length of n-grams whose repetition is penalised, in tokens. 0 disables it.", ge=0)
    repetition_penalty: float = key(0.001, "Penalty for each repeated n-gram.", ge=0)

    @property
    def is_on(self) -> bool:
        """Return whether any term is added."""
        return bool(self.overlong_tokens or self.cosine_coef or self.repetition_ngram)
