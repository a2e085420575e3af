"""A fixture with one tiny model for all tests of a file."""

import pytest
import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, "qwen2", tied=True)
