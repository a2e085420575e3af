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
        "Coefficient of ProRLv2's length reward, which is added in the first 100 of every 600 steps: (cos(pi t / "
        "rollout.max_tokens) - 1) / 4 for a correct response with t tokens.",
    )
    repetition_ngram: int = key(
        0, "Length of n-grams in tokens. Each repetition of one costs a reward of 0.001. 0 disables it.", ge=0
    )

    @property
    def is_on(self) -> bool:
        """Return whether any term is added."""
        return bool(self.overlong_tokens or self.cosine_coef or self.repetition_ngram)
