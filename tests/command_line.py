"""Run the command line in the test process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_brorl.cli.main import main


def output(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    """Run `brorl` and check its exit code. Return its stdout, or its stderr if the code is not 0."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert end.value.code == code, captured.err
    return captured.err if code else captured.out


def error_line(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Run `brorl`, check that it ends with exit code 2 and one line on stderr, and return the line."""
    (line,) = output(capsys, *arguments, code=2).splitlines()
    assert line.startswith("brorl: ")
    return line
