"""MaxRL and GSPO as functions of a user against the built-in ones, in float64 and in several layouts."""

from __future__ import annotations

import pytest
from ops import own_algorithms

FILE = own_algorithms.__file__
BUILT_IN = {"advantage": "maxrl", "ratio": "sequence"}
OWN = {"advantage": f"{FILE}:maxrl", "policy_loss": f"{FILE}:gspo"}


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (2, {"tensor": 2}), (2, {"pipeline": 2})])
def test_loss_and_gradient_equal_the_built_in_ones(worlds, directory, size, parallel):
    job = "algorithm_jobs:loss_and_gradients"
    ((expected, _),) = worlds(1).run(job, directory, {}, BUILT_IN)
    results = (worlds(size).run(job, directory, parallel, algorithm) for algorithm in (OWN, BUILT_IN))
    for rank, ((loss, gradients), (_, wanted)) in enumerate(zip(*results, strict=True)):
        if "pipeline" not in parallel or rank == size - 1:
            assert loss == pytest.approx(expected, rel=1e-6)
        assert gradients.keys() == wanted.keys()
        assert sum(float(x.norm()) for x in wanted.values()) > 0.1
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
