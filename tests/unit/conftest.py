"""One process's grid and one tiny model for every test of a file."""

import pytest
import tiny

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.parallel import grid


@pytest.fixture(scope="module")
def processes():
    yield grid.build(ParallelConfig())
    grid.leave()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, "qwen2", True)
