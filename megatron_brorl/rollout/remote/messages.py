"""Messages between a trainer rank and an engine process: a versioned JSON header and raw tensors, never a pickle.

Frames: header, then the bytes of each tensor that it lists. Both ends may run different torch and Python versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PROTOCOL = 4  # raised with every change of a message
_DTYPES = {"int64": torch.int64, "float32": torch.float32}


class ProtocolError(RuntimeError):
    """The other end has another version, or something that is no message of ours."""


@dataclass(frozen=True)
class Message:
    """What is asked or told. Fields are JSON values; tensors are int64 or float32 of one dimension."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def encode(message: Message) -> list[bytes]:
    """The frames of a message: its header, then each tensor [n] in bytes."""
    table = [[name, str(x.dtype).removeprefix("torch."), len(x)] for name, x in message.tensors.items()]
    header = {"protocol": PROTOCOL, "kind": message.kind, "fields": dict(message.fields), "tensors": table}
    return [json.dumps(header).encode(), *(x.contiguous().numpy().tobytes() for x in message.tensors.values())]


def decode(frames: Sequence[bytes]) -> Message:
    """The message of `frames`. Raises ProtocolError naming both versions where they differ."""
    # What comes from another version may have any other form: nothing but the version is looked at before it fits.
    try:
        header = json.loads(frames[0])
        protocol = header["protocol"]
    except (ValueError, LookupError, TypeError) as e:  # no JSON, no such key, no object
        raise ProtocolError(f"not a message of the engine protocol: {e}") from None

    # Two environments meet here; which of them is the old one only the user can tell.
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"trainer and engine process have different protocols ({protocol} and {PROTOCOL}): both must run the same "
            "version of megatron_brorl"
        )

    # Every tensor is as long as the header says.
    table = header["tensors"]
    if len(table) != len(frames) - 1:
        raise ProtocolError(f"{header['kind']}: {len(frames) - 1} tensors came, the header lists {len(table)}")

    # Bytes are copied, because a frame's memory is the socket's, and an empty frame has none.
    tensors = {}
    for (name, dtype, length), data in zip(table, frames[1:], strict=True):
        # Asked first, because of a shorter frame frombuffer would quietly make fewer numbers.
        if len(data) != length * _DTYPES[dtype].itemsize:
            raise ProtocolError(f"{header['kind']}: {name} has {len(data)} bytes, not {length} of {dtype}")
        empty = torch.empty(0, dtype=_DTYPES[dtype])
        tensors[name] = torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]) if length else empty

    # The fields are left to whoever knows the kind.
    return Message(header["kind"], header["fields"], tensors)
