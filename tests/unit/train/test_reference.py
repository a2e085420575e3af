"""When the reference policy is reset, and the effect of a reset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_brorl.config.schema import ReferenceConfig
from megatron_brorl.train.models import ReferencePolicy
from megatron_brorl.train.state import EarlyStopping


def make(offload: bool = False, **settings: Any) -> tuple[ReferencePolicy, torch.nn.Linear]:
    actor = torch.nn.Linear(2, 1)
    worker: Any = SimpleNamespace(
        actor=actor,
        reload=lambda: None,
        options=SimpleNamespace(offload=offload),
        log_probs=lambda *_: [actor.weight.detach().clone()],
    )
    return ReferencePolicy(worker, ReferenceConfig(**settings)), actor


def test_reset_every_n_steps():
    reference, _ = make(reset_every=3)
    assert [step for step in range(1, 8) if reference.reset_reason(step, evaluations=0)] == [3, 6]


def test_reset_after_evaluations_without_improvement():
    reference, _ = make(reset_patience=2)
    resets = []
    counter = EarlyStopping()
    for score in (0.3, 0.3, 0.4, 0.4, 0.35, 0.39, 0.41, 0.2, 0.41):
        counter.record(score)
        resets.append(bool(reference.reset_reason(step=1, evaluations=counter.count)))
        if resets[-1]:
            counter.count = 0
    # 0.4 is the best until 0.41. The second evaluation without a new best resets the reference and the count.
    assert resets == [False, False, False, False, True, False, False, False, True]


def test_the_reference_is_in_host_memory_with_offload():
    """Offloading frees the memory. log_probs restores the weights, and the actor's weights do not change."""
    for offload in (True, False):
        reference, actor = make(offload)
        before = actor.weight.detach().clone()
        with torch.no_grad():
            actor.weight.add_(1)
        reference.offload()
        device_bytes = sum(x.untyped_storage().nbytes() for x in reference.weights.values())
        assert device_bytes == (0 if offload else 3 * 4)  # float32: a weight of [1, 2], and the bias
        assert torch.equal(reference.log_probs([], [], temperature=1.0)[0], before)
        assert torch.equal(actor.weight, before + 1)
        reference.offload()
        reference.reset()
        assert torch.equal(reference.weights["weight"], before + 1)
