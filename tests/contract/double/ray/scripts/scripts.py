"""A fake `ray start` with the options of Ray 2.53: it checks its options, binds its ports and blocks."""

from __future__ import annotations

import argparse
import signal
import socket


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    start = parser.add_subparsers(required=True).add_parser("start", allow_abbrev=False)
    for flag in ("--head", "--block", "--disable-usage-stats"):
        start.add_argument(flag, action="store_true", required=True)
    start.add_argument("--node-ip-address", required=True)
    start.add_argument("--include-dashboard", choices=["true", "false"])
    names = ["port", "node-manager-port", "object-manager-port", "metrics-export-port", "runtime-env-agent-port"]
    names += ["dashboard-agent-grpc-port", "dashboard-agent-listen-port"]
    for name in names:
        start.add_argument(f"--{name}", type=int, required=True)
    for name in ("ray-client-server-port", "min-worker-port", "max-worker-port", "num-gpus", "num-cpus"):
        start.add_argument(f"--{name}", type=int)
    args = vars(parser.parse_args())

    sockets = []
    for name in names:
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((args["node_ip_address"], args[name.replace("-", "_")]))
        s.listen()
        sockets.append(s)
    signal.pause()


if __name__ == "__main__":
    main()
