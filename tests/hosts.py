"""Two hosts on one machine: network namespaces with a cable between them, and the ranks that torchrun starts there.

    with two_hosts() as hosts:
        hosts[0].limit_rate("200mbit")
        results = run_on_hosts(hosts, train, "hsdp")       # `train` at the top of a file; a result for each rank

A host has its own network, loopback and process numbers; files and cores are shared. Nothing has a name that
another run could take: one process holds each host, and ends when its standard input does. So hosts end with
the program that made them, however that ends, and with a host its processes, its network and the cable.

This needs Linux, util-linux and iproute2. User namespaces make it work for everybody, not only for root, where the
system allows them. In these there is one user and one group only: `own_users=False` is for programs that change theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fullshard

INTERFACE = "cable0"
SOURCE = Path(fullshard.__file__).parent.parent  # of the package that these tests are about
_USERS = ("--user", "--preserve-credentials")  # enters a host's user namespace
_PORT = 29400  # of the rendezvous; free, since the hosts are new


class NoHosts(Exception):  # noqa: N818  # says what is the case
    """This system does not let us make hosts; the message says why."""


@dataclass(frozen=True)
class Host:
    """One host: its address on the cable, a folder that is its own, the process that holds it, and whether it has a
    user namespace."""

    address: str
    folder: Path
    holder: subprocess.Popen[bytes]
    own_users: bool

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start the command on this host, in its folder."""
        enter = [*self._enter(), f"--pid=/proc/{self.holder.pid}/ns/pid_for_children"]
        return subprocess.Popen([*enter, *command], cwd=self.folder, **options)

    def limit_rate(self, rate: str | None) -> None:
        """Limit the bit rate of outgoing traffic, such as "200mbit"; None for no limit."""
        self.configure("tc", "qdisc", "del", "dev", INTERFACE, "root", check=False)
        if rate is not None:
            # The burst holds the largest packets that the kernel hands over; the limit is long enough to drop none.
            limits = ("rate", rate, "burst", "128kb", "limit", "32mb")
            self.configure("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limits)

    def plug(self, connected: bool) -> None:
        """Connect or disconnect the network cable."""
        self.configure("ip", "link", "set", INTERFACE, "up" if connected else "down")

    def stop_all(self) -> None:
        """Kill all processes on this host."""
        self.start(
            "sh", "-c", "kill -KILL -1"
        ).wait()  # all but itself and the holder, which is the host's first process

    def power_off(self) -> None:
        """End this host, with every process on it. May be called again."""
        with self.holder:  # closes its standard input, and waits
            pass

    def configure(self, *command: str, check: bool = True) -> None:
        """Run a command that changes this host's network."""
        done = subprocess.run([*self._enter(), *command], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise NoHosts(f"'{' '.join(command)}' failed: {done.stderr.strip()}")

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", *(_USERS if self.own_users else ()), "--net"]


@contextmanager
def two_hosts(*, own_users: bool = True) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, for as long as the block lasts.

    Args:
        own_users: whether they have a user namespace; without one, only root can make them.

    Raises:
        NoHosts: this system does not allow it, or lacks a program.
    """
    missing = [program for program in ("unshare", "nsenter", "ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NoHosts(f"{', '.join(missing)} not found: util-linux and iproute2 (on Linux) are needed")
    with tempfile.TemporaryDirectory(prefix="fullshard-hosts-") as name, ExitStack() as stack:
        users = ("--user", "--map-root-user") if own_users else ()
        first = _host("10.77.0.1", Path(name), own_users, "unshare", *users)
        stack.callback(first.power_off)
        # The second one belongs to the first one's user namespace, or the two could not share a cable.
        enter = ("nsenter", f"--target={first.holder.pid}", *_USERS) if own_users else ()
        second = _host("10.77.0.2", Path(name), own_users, *enter, "unshare")
        stack.callback(second.power_off)
        for host in (first, second):
            # Or the cable would go with a host that is powered off, and the other one's address with the cable.
            stack.callback(os.close, os.open(f"/proc/{host.holder.pid}/ns/net", os.O_RDONLY))
        other_end = ("peer", "name", INTERFACE, "netns", str(second.holder.pid))
        first.configure("ip", "link", "add", INTERFACE, "type", "veth", *other_end)
        for host in (first, second):
            host.configure("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.configure("ip", "link", "set", "lo", "up")
            host.plug(True)
        yield first, second


def _host(address: str, folder: Path, own_users: bool, *unshare: str) -> Host:
    """A host whose network is not set up. What keeps it is `cat`, its first process; that answers when all is ready."""
    command = [*unshare, "--net", "--pid", "--fork", "cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        holder.stdin.write(b"\n")
        answered = holder.stdout.readline() == b"\n"
    except BrokenPipeError:
        answered = False
    if not answered:
        with holder:
            stated = holder.stderr.read().decode().strip()
        raise NoHosts(f"no namespaces here: '{' '.join(command)}' said {stated!r}")
    own = folder / address
    own.mkdir()
    return Host(address, own, holder, own_users)


# --------------------------------------------------------------------------------------------------- ranks on hosts


def torchrun(
    hosts: Sequence[Host],
    *argv: str,
    ranks: int = 2,
    nodes: str = "",
    environ: Mapping[str, str] | None = None,
    rendezvous: str = "",
    first: Host | None = None,
    port: int = _PORT,
    **options: Any,
) -> list[subprocess.Popen[Any]]:
    """Start torchrun on every host with `ranks` ranks each; `argv` is its script and the script's arguments.

    The commands are those of two real machines, but for their addresses.

    Args:
        nodes: how many hosts the job may have, as in "1:2"; as many as `hosts`, if it says nothing.
        environ: variables of the environment besides.
        rendezvous: what `--rdzv-conf` says besides, as in "last_call_timeout=2".
        first: the host where hosts find one another; the first of `hosts` if None.
        port: of that.
    """
    first = first or hosts[0]
    more = f",{rendezvous}" if rendezvous else ""
    common = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)]),
    }
    return [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes or len(hosts)}", f"--nproc-per-node={ranks}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{port}"),
            # Without a name service, torchrun cannot find its own address.
            *(f"--rdzv-conf=is_host={int(host is first)}{more}", f"--local-addr={host.address}"),
            *argv,
            **{"env": {**os.environ, **common, **(environ or {})}, **options},
        )
        for host in hosts
    ]


def run_on_hosts(
    hosts: Sequence[Host], function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 300
) -> list[Any]:
    """`function(*args)` on `ranks` ranks of each host at once; what each rank returned, in rank order.

    As `fullshard.testing.run_ranks`, but by torchrun. Raises `RuntimeError` with all output if a rank fails.
    """
    import torch  # late: it is slow to import, and hosts alone do without it

    with tempfile.TemporaryDirectory(prefix="fullshard-job-") as name:
        folder = Path(name)
        torch.save((function, args), folder / "job")
        with (folder / "output").open("w+") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            started = torchrun(hosts, __file__, str(folder), ranks=ranks, **streams)
            codes = wait_for(started, timeout)
            if codes != [0] * len(hosts):
                for host in hosts:
                    host.stop_all()
                output.seek(0)
                raise RuntimeError(f"torchrun ended with {codes}:\n{output.read()}")
        results = [folder / f"rank{rank}" for rank in range(ranks * len(hosts))]
        return [torch.load(path, weights_only=False) for path in results]


def wait_for(processes: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int | None]:
    """Return the exit codes, once all have ended; None for those that have not in time: `Host.stop_all` ends these."""
    deadline = time.monotonic() + timeout
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.kill()
            process.wait()
    return codes


def sent_bytes() -> int:
    """Return the bytes that this rank's host has sent by gloo's interface until now, counted by the kernel."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return int(counts[8])  # after eight counts of what was received


def _rank_main(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    function, args = torch.load(folder / "job", weights_only=False)
    dist.init_process_group("gloo")
    torch.save(function(*args), folder / f"rank{dist.get_rank()}")
    dist.barrier()  # otherwise slower ranks would see closed connections of the ranks that exit
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
