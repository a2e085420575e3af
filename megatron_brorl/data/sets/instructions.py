"""Instructions whose keeping can be checked: IFEval."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_brorl.data.sets.form import Raw, Task, listed, text
from megatron_brorl.errors import UserError


def ifeval(raw: Raw, where: str) -> Task:
    """key, prompt, instruction_id_list, and a set of arguments for each instruction in kwargs."""
    names, arguments = listed(raw, where, "instruction_id_list"), listed(raw, where, "kwargs")
    if len(names) != len(arguments) or not all(isinstance(a, Mapping) for a in arguments):
        raise UserError(f"{where}: kwargs must have an object for each of the {len(names)} instructions")
    # Parquet gives every object the keys of all others.
    given = [{key: value for key, value in a.items() if value is not None} for a in arguments]
    metadata = {"instruction_id_list": names, "kwargs": given}
    key = raw.get("key")
    return Task(text(raw, where, "prompt"), None, "ifeval", metadata, "" if key is None else str(key))
