"""The cross-fitted changes of one position, by matrices over pairs of siblings and loops over tokens."""

from __future__ import annotations

import numpy as np


def changes(token: np.ndarray, reward: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """policy_gradient and sampled of theory.token_level, for draws [n] from p [V].

    The first by eq. 5 of Song et al. 2012, "Feature selection via dependence maximization", term by term.
    """
    n = len(token)
    ones = np.ones(len(token))
    same = (token[:, None] == token).astype(float) - np.eye(n)
    product = np.outer(reward, reward) * (1 - np.eye(n))
    criterion = np.trace(same @ product)
    criterion += (ones @ same @ ones) * (ones @ product @ ones) / ((n - 1) * (n - 2))
    criterion -= 2 / (n - 2) * (ones @ same @ product @ ones)
    gradient = (n - 1) / n * criterion / (n * (n - 3))

    # The other half values what every second sibling's step changes.
    sampled = 0.0
    for step, value in ((0, 1), (1, 0)):
        mine = slice(step, None, 2)
        theirs = slice(value, None, 2)
        drawn = set(token[mine].tolist())
        better = {j: reward[mine][token[mine] == j].mean() - reward[mine].mean() for j in drawn}
        s_r = sum(p[j] * b for j, b in better.items())
        centred = reward[theirs] - reward[theirs].mean()
        for j in drawn:
            worth = centred[token[theirs] == j].sum() / (len(centred) - 1)
            sampled += worth * p[j] * (better[j] - s_r) / n / 2
    return float(gradient), float(sampled)
