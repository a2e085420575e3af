"""One end of the socket to an engine process, which may die and come back at any time."""

from __future__ import annotations

import time

import zmq

from megatron_brorl.rollout.remote.messages import Message, decode, encode
from megatron_brorl.rollout.remote.options import Capabilities

_SILENT_S = 1.5  # without a heartbeat; then the engine is greeted again, which a new one needs


class Link:
    """For use by one thread at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.boot = 0  # names the process that was heard last; 0 = none yet
        self.version = -1  # of its weights
        self.capabilities: Capabilities | None = None
        self.heard = time.monotonic()
        self._greeted = 0.0
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self.address)
        return socket

    def renew(self) -> None:
        """Forget the process that was there, and what was still to be sent to it."""
        self._socket.close()
        self._socket = self._connect()
        self.boot, self.version, self._greeted = 0, -1, 0.0
        self.heard = time.monotonic()

    def send(self, message: Message) -> None:
        """Hand a message over for sending; whether it arrives, answers show."""
        self._socket.send_multipart(encode(message))

    def greet(self) -> None:
        """Make oneself known to the process, which answers with its capabilities and state."""
        self._greeted = time.monotonic()
        self.send(Message("hello"))

    def poll(self, seconds: float) -> list[Message]:
        """What has arrived, after waiting so long for the first; heartbeats are taken note of. Raises ProtocolError."""
        now = time.monotonic()
        if now - max(self.heard, self._greeted) > _SILENT_S or not self._greeted:
            self.greet()

        found = []
        if self._socket.poll(int(seconds * 1000)):
            while self._socket.poll(0):
                message = decode(self._socket.recv_multipart())
                self.heard = time.monotonic()
                if message.kind == "heartbeat":
                    self.boot, self.version = message.fields["boot"], message.fields["version"]
                elif message.kind == "hello":
                    fields = {**message.fields, "devices": tuple(message.fields["devices"])}
                    self.capabilities = Capabilities(**fields)
                else:
                    found.append(message)
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
