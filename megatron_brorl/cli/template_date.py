"""run.dir/template_date: the date that the chat template writes into prompts, one for all of a run.

Chat templates such as those of Llama 3 and gpt-oss write today's date. A run that is resumed on another day, and an
evaluation in the same run.dir, use the date of the first start, so that their prompts are the same.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from megatron_brorl.data.source import TEMPLATE_DATE
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives

FILE = TEMPLATE_DATE


def stored(directory: Path) -> datetime.date | None:
    """Return the date that an earlier start kept, or None.

    Raises UserError where the file holds no date, OSError where it cannot be read.
    """
    path = directory / FILE
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise UserError(f"{path}: must hold a date such as 2026-01-31; delete it to take today's date") from None


def keep(directory: Path, date: datetime.date | None, is_main_rank: bool) -> None:
    """Write the date of this start, if the template uses one. Raises UserError. A collective."""
    if date is None:
        return
    # Ranks that start at midnight may have read two dates.
    dates = sorted(set(collectives.all_gather_text(str(date))))
    if len(dates) > 1:
        raise UserError(f"{directory / FILE}: ranks started on different days, {' and '.join(dates)}: start again")
    if is_main_rank:
        try:
            (directory / FILE).write_text(f"{date}\n", encoding="utf-8")
        except OSError as e:
            raise UserError(f"{directory / FILE}: cannot be written: {e.strerror}") from None
