"""Whether trained weights differ from those that they began as: looked at while they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from megatron_brorl.checkpoints.hugging_face import Checkpoint


class Comparison:
    """Compares tensors, on their way to a file, with those of a Hugging Face directory, up to the first difference."""

    def __init__(self, directory: str | Path) -> None:
        """directory: of the weights before the training."""
        self._before = Checkpoint(Path(directory))
        self.differs = False

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same pairs, of any shape. Stored ones are compared in the type that they are written in."""
        for name, tensor in tensors:
            if not self.differs and name in self._before.files:
                stored = self._before.tensor(name).to(tensor.dtype)
                self.differs = not stored.equal(tensor.detach().cpu())
            yield name, tensor
