#!/usr/bin/env python3
"""`brorl convert` by its older name, with the same arguments."""

from __future__ import annotations

import sys

from megatron_brorl.cli.main import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
