"""Run `brorl quantize` with the given arguments."""

from __future__ import annotations

import sys

from megatron_brorl.cli.main import main

if __name__ == "__main__":
    main(["quantize", *sys.argv[1:]])
