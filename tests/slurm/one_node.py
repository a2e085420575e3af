"""A real Slurm on one node for tests: munged, slurmctld and slurmd run in one folder as the current user.

Debian: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge. It has no cgroups, accounting or
GPUs. Jobs of partition "high" preempt jobs of "low", which have two minutes to end and are then requeued. Partition
"cluster" has eight nodes of eight GPUs that are down, so its jobs only wait.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
SETTINGS = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=5
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000
NodeName=gpu[1-8] NodeAddr=127.0.0.1 CPUs=96 RealMemory=1000 Gres=gpu:8 State=DOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
PartitionName=cluster Nodes=gpu[1-8] PriorityTier=1
"""


def missing() -> str:
    """Return the programs that are not installed."""
    return " ".join(p for p in PROGRAMS if _program(p) is None)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class OneNode:
    """The Slurm daemons, until `close` is called."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # the path of a socket has at most 107 characters
        self._daemons: list[subprocess.Popen[bytes]] = []
        (self.folder / "state").mkdir()
        (self.folder / "spool").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged requires that other users can reach its socket.
        host = socket.gethostname().partition(".")[0]
        conf = self.folder / "slurm.conf"
        ports = {"port": _free_port(), "node_port": _free_port()}
        conf.write_text(SETTINGS.format(host=host, user=getpass.getuser(), folder=self.folder, **ports))
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        self._start("munged", "--foreground", *self._munge("socket", "pid", "log", "seed"), f"--key-file={key}")
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D")
        self._await_node()

    def _munge(self, *files: str) -> list[str]:
        return [f"--{f}{'' if f == 'socket' else '-file'}={self.folder / f'munge.{f}'}" for f in files]

    def _start(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with open(self.folder / f"{name}.log", "wb") as log:
            self._daemons.append(subprocess.Popen([program, *arguments], stdout=log, stderr=log, env=self.environment))

    def _await_node(self) -> None:
        deadline = time.monotonic() + 120
        while self.command("sinfo", "-h", "-p", "low", "-o", "%T").stdout.strip() != "idle":
            if time.monotonic() > deadline or any(d.poll() is not None for d in self._daemons):
                logs = [f"{p.name}: {p.read_text(errors='replace')[-500:]}" for p in self.folder.glob("*.log")]
                self.close()
                raise RuntimeError("Slurm does not start:\n" + "\n".join(logs))
            time.sleep(0.5)

    def command(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm in its environment."""
        return subprocess.run(arguments, env=self.environment, capture_output=True, text=True, cwd=cwd)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job by their names in scontrol. Times are Unix times."""
        shown = self.command("env", "SLURM_TIME_FORMAT=%s", "scontrol", "show", "job", number).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def close(self) -> None:
        """End the jobs and the daemons."""
        self.command("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 60
        while self.command("squeue", "-h").stdout and time.monotonic() < deadline:
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
