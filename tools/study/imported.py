"""What every process of a study needs, imported once by the one that they are forks of."""

from __future__ import annotations

from megatron_brorl.parallel import device

device.leave_out_compiler()  # before Megatron is imported

import reasoning_gym  # noqa: E402, F401

from study import pilot, trial, warm_start  # noqa: E402, F401
