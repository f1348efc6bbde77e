"""Several nodes on one machine: network namespaces joined by links."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEVICE = "bagua"
HOME = "10.200.77.254"
"""The address of the namespace that `joined` is called in."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_INFORMATION, _HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02
_HEADER_BYTES, _MOST_BYTES = 10, 1 << 16


class UnavailableError(Exception):
    """Network namespaces cannot be made here."""


def unshare(*needed: str) -> list[str]:
    """Return the command in front of a program that is to run in a network namespace of its own,
    where it may make others.

    Args:
        needed: further programs that it will call.

    Raises:
        UnavailableError: this is not possible; says why.
    """
    if missing := [
        name for name in ("unshare", "nsenter", "ip", *needed) if shutil.which(name) is None
    ]:
        raise UnavailableError(
            f"needs Linux with iproute2 and util-linux; {', '.join(missing)} is not installed"
        )
    for flags in ("-Urn", "-n"):  # in a user namespace if that is allowed, else as root
        if subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0:
            return ["unshare", flags]
    raise UnavailableError(
        "may not create network namespaces; run it as root or allow user namespaces"
    )


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def joined(count: int, delay: float = 0.0) -> Iterator[list[int]]:
    """Join ``count`` new namespaces by a switch in this one, which `unshare` has made; yield the id
    of a process in each.

    Each has a link called `DEVICE`, and its `address`.

    Args:
        count: of namespaces.
        delay: seconds from sending a packet to its arrival. If it is not 0, a process forwards
            packets between the new namespaces instead of the switch, and `HOME` is out of reach.
    """
    nodes: list[subprocess.Popen[bytes]] = []
    others: list[subprocess.Popen[bytes]] = []
    run("ip", "link", "add", "switch", "type", "bridge")
    try:
        run("ip", "address", "add", f"{HOME}/24", "dev", "switch")
        for device in ("lo", "switch"):
            run("ip", "link", "set", device, "up")
        for rank in range(count):
            # A host that is called like its address needs no name server.
            named = f"echo {address(rank)} > /proc/sys/kernel/hostname; exec sleep infinity"
            node = subprocess.Popen(["unshare", "-n", "-u", "sh", "-c", named])
            nodes.append(node)
            while os.readlink(f"/proc/{node.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
            port, inside = f"port{rank}", there(node.pid)
            if delay:
                run(*inside, "ip", "tuntap", "add", DEVICE, "mode", "tun")
            else:
                run(
                    "ip",
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    DEVICE,
                    "netns",
                    str(node.pid),
                )
                run("ip", "link", "set", port, "master", "switch", "up")
            run(*inside, "ip", "address", "add", f"{address(rank)}/24", "dev", DEVICE)
            run(*inside, "ip", "link", "set", DEVICE, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
        found = [node.pid for node in nodes]
        if delay:
            others.append(
                subprocess.Popen([sys.executable, __file__, str(delay), *map(str, found)])
            )
        yield found
    finally:
        # Links would be removed with their namespaces, but not at once.
        for rank in range(len(nodes)):
            subprocess.run(["ip", "link", "delete", f"port{rank}"], capture_output=True)
        subprocess.run(["ip", "link", "delete", "switch"], capture_output=True)
        for process in (*nodes, *others):
            process.kill()
            process.wait()


def address(rank: int) -> str:
    return f"10.200.77.{rank + 1}"


def slow_down(rate: str | None, burst: str = "256kb", queue: str = "50ms") -> None:
    """Let what this namespace sends take ``rate``, as tc writes it, such as "10mbit"; None: as fast
    as it can.

    After a pause, up to ``burst`` is sent at once. What would wait for longer than ``queue`` is
    dropped, and TCP sends it again.
    """
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], capture_output=True)
    if rate is not None:
        run(
            "tc",
            "qdisc",
            "add",
            "dev",
            DEVICE,
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            burst,
            "latency",
            queue,
        )


def bytes_sent() -> int:
    """Return the bytes sent from this namespace."""
    line = next(
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith(f"{DEVICE}:")
    )
    return int(line.split(":")[1].split()[8])


def there(process: int) -> tuple[str, ...]:
    """Return the command in front of a program that is to run in the namespace of ``process``."""
    return ("nsenter", "-t", str(process), "-n", "-u")


def enter(process: int) -> None:
    """Move this thread, and those that it will start, to the namespace of ``process``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(
                ctypes.get_errno(), f"setns to the network namespace of process {process}"
            )


def forward(delay: float, processes: Sequence[int]) -> None:
    """Deliver what each of the namespaces of ``processes`` sends to another ``delay`` seconds
    later, for ever.
    """
    tuns = []
    for process in processes:
        enter(process)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            tun,
            _TUNSETIFF,
            struct.pack("16sH22x", DEVICE.encode(), _TUN | _NO_INFORMATION | _HEADER),
        )
        # as veth: up to 64 KiB of a connection come at once
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS)
        tuns.append(tun)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for tun in select.select(tuns, [], [], rest)[0]:
            waiting.append((time.monotonic() + delay, os.read(tun, _HEADER_BYTES + _MOST_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            packet = waiting.popleft()[1]
            version, end = packet[_HEADER_BYTES] >> 4, packet[_HEADER_BYTES + 19]
            if version == 4 and end <= len(tuns):  # IPv6 looks for routers
                os.write(tuns[end - 1], packet)  # to the address that ends so


if __name__ == "__main__":
    forward(float(sys.argv[1]), list(map(int, sys.argv[2:])))
