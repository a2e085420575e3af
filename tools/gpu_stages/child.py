"""The process of one stage: python -m gpu_stages.child STAGE JOB.json ROWS.jsonl

Every row is written when it is known, so that what ends this process costs no row that came before.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from gpu_stages.common import Job


def main() -> None:
    stage, job, rows = sys.argv[1:]
    made = Job(**json.loads(Path(job).read_text(encoding="utf-8")))
    with open(rows, "a", encoding="utf-8") as file:
        for row in importlib.import_module(f"gpu_stages.{stage}").run(made):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
