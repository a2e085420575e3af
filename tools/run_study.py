"""Run a declared study and write its page, or go on with one: a design file says all that is run and how it is read.

python tools/run_study.py tools/study/designs/smoke.toml runs/smoke
python tools/run_study.py tools/study/designs/width.toml runs/width --plan   # what would be run, and for how long
python tools/run_study.py tools/study/designs/width.toml runs/width --page   # the page of what is there, without runs

The directory keeps the design and its sha256, which every row of the results repeats: results of another design are
refused. What is done is not done again; a run that was killed is repeated from its start. Written there:
results.parquet, page.md and its figures.

It is a tool of this repository and no command of the package: it makes the results that docs/ shows, from models and
tasks that are made here. What it uses of the package is what `brorl train`, `sft` and `evaluate` are made of.
"""

from study.command import main

if __name__ == "__main__":
    main(__doc__)
