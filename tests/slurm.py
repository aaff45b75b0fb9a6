"""Slurm on the two hosts of `hosts.py`: its own daemons, a node on each.

    with two_hosts(own_users=False) as hosts, slurm_on(hosts, folder) as slurm:
        slurm.run("sbatch", "job.sh")

Nodes are called a1 and a2, and find one another by name, as those of a real cluster do. Each says that it has eight
GPUs, which nothing behind it keeps. Slurm is Debian's: `apt-get install slurmd slurmctld slurm-client`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Host, NoHosts

_PROGRAMS = "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel"
_CONTROLLER = 1  # the place of the node that has it, so that the first one may be lost

_CONFIGURATION = """
ClusterName=two
SlurmctldHost=a2
SlurmUser=root
AuthType=auth/none
CredType=cred/none
# A requeued job waits for this number of seconds.
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
SlurmdTimeout=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=a[1-2] CPUs=1 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up.

    Args:
        hosts: its nodes.
        folder: with its configuration and logs.
        daemons: what was started on the nodes.
    """

    hosts: Sequence[Host]
    folder: Path
    daemons: list[subprocess.Popen[Any]]

    def run(self, *command: str, **variables: str) -> str:
        """Run a command on the second node, with `variables` in its environment, and return its output."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = self.start(_CONTROLLER, *command, text=True, environ=variables, **streams)
        stated, _ = process.communicate(timeout=60)
        assert process.returncode == 0, command
        return str(stated)

    def start(
        self, node: int, *command: str, environ: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a node, which has a name and knows those of all nodes."""
        names = f"hostname a{node + 1} && mount --bind {self.folder}/hosts /etc/hosts && mount -t proc proc /proc"
        enter = ("unshare", "--uts", "--mount", "sh", "-c", f'{names} && exec "$@"', "sh")
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **(environ or {})}
        return self.hosts[node].start(*enter, *command, env=environment, **options)

    def start_daemon(self, node: int, name: str) -> None:
        """`slurmd` or `slurmctld`, until its host ends."""
        self.daemons.append(self.start(node, name, "-D", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def nodes_at_work(self) -> int:
        """How many nodes are free or have jobs."""
        states = self.run("sinfo", "--Node", "--noheader", "--format=%t").split()
        return sum(state in ("idle", "mix", "alloc") for state in states)

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        words = self.run("scontrol", "show", "job", str(number), "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm_on(hosts: Sequence[Host], folder: Path) -> Iterator[Slurm]:
    """A cluster, for as long as the block lasts; it ends with its hosts' processes.

    Raises:
        NoHosts: Slurm is not installed, or its daemons do not start here.
    """
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        raise NoHosts(f"{', '.join(missing)} not found: Slurm's slurmd, slurmctld and slurm-client are needed")
    slurm = Slurm(hosts, folder, [])
    named = [f"{host.address} a{place + 1}\n" for place, host in enumerate(hosts)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(named))
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder))
    for name in ("state", "a1", "a2"):
        (folder / name).mkdir()
    for number in range(8):
        (folder / f"gpu{number}").touch()
    try:
        slurm.start_daemon(_CONTROLLER, "slurmctld")
        for node in range(len(hosts)):
            slurm.start_daemon(node, "slurmd")
        _wait_for_nodes(slurm)
        yield slurm
    finally:
        for host in hosts:
            host.stop_all()
        for daemon in slurm.daemons:
            daemon.wait()


def _wait_for_nodes(slurm: Slurm) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            if slurm.nodes_at_work() == len(slurm.hosts):
                return
        except AssertionError:  # the controller is not there yet
            pass
        if time.monotonic() > until:
            logs = [path.read_text()[-1000:] for path in slurm.folder.glob("*.log")]
            raise NoHosts("Slurm's daemons do not start here:\n" + "\n".join(logs))
        time.sleep(0.3)
