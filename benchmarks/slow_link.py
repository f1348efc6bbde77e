"""Time per training step of every algorithm over a slow link: two processes in two network namespaces, joined by veth and tbf.

Peers in the same run: torch's DistributedDataParallel with its defaults, with its best settings, and with its fp16 and
PowerSGD hooks; Decent-DP (pip install decent-dp), a maintained decentralized trainer. Each is shown with its limit: the bytes that
a rank sends divided by the link's bandwidth. It needs Linux with iproute2 and permission to create network namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from allreduce_step import network
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer

SIZES = [1024, *[1448] * 3, 576]  # 6.5e6 parameters
BATCH = 8
LINKS = {"1 Gbit/s": ("1gbit", 1e9), "100 Mbit/s": ("100mbit", 1e8)}
ADDRESSES = ("10.200.77.1", "10.200.77.2")
BARS = {"1 Gbit/s": 2.0, "100 Mbit/s": 3.3}
Step = Callable[[], None]


def trainer(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Step:
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(SIZES[-1], (BATCH,))

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def ours(name: str) -> tuple[Step, Callable[[], None]]:
    module = network(SIZES)
    optimizer = (
        QAdamOptimizer(module.parameters(), warmup_steps=2) if name == "qadam" else torch.optim.SGD(module.parameters(), lr=0.01)
    )
    arguments = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
    if name != "async":
        arguments["hierarchical"] = False
    module.with_bagua([optimizer], Algorithm.init(name, **arguments))
    stop = (lambda: module.bagua_algorithm.abort(module)) if name == "async" else (lambda: None)
    return trainer(module, optimizer), stop


def ddp(hook: str = "", **settings: Any) -> tuple[Step, Callable[[], None]]:
    inner = network(SIZES)
    module = DistributedDataParallel(inner, **settings)
    if hook == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD":
        module.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    return trainer(module, torch.optim.SGD(inner.parameters(), lr=0.01)), lambda: None


def decent() -> tuple[Step, Callable[[], None]]:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    wrapped = DecentralizedDataParallel(network(SIZES), lambda named: torch.optim.SGD([p for _, p in named], lr=0.01))
    return trainer(wrapped, None), lambda: None


CONTENDERS: dict[str, Callable[[], tuple[Step, Callable[[], None]]]] = {
    "DDP": ddp,
    "DDP, best settings": lambda: ddp(gradient_as_bucket_view=True, static_graph=True),
    "DDP, fp16 hook": lambda: ddp("fp16"),
    # One bucket: with several, this hook's callbacks reorder collectives on gloo.
    "DDP, PowerSGD hook": lambda: ddp("PowerSGD", bucket_cap_mb=1000),
    "Decent-DP": decent,
    **{name: (lambda name=name: ours(name)) for name in (
        "gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async",
    )},
}  # fmt: skip


def sent() -> int:
    """Return the bytes sent through this namespace's link."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("slow:"))
    return int(line.split(":")[1].split()[8])


def work(rank: int, port: int, steps: int, output: str) -> None:
    """Run as one rank: time each contender's steps and count the bytes that it sends, one contender after the other."""
    torch.set_num_threads(1)
    os.environ.update(
        {"GLOO_SOCKET_IFNAME": "slow", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": "2"}
    )
    os.environ["GROUP_RANK"] = str(rank)
    store = dist.TCPStore(ADDRESSES[0], port, 2, is_master=rank == 0)
    bagua_ref.init_process_group(store, rank, 2)
    result = {}
    for name, make in CONTENDERS.items():
        try:
            step, stop = make()
        except ImportError as error:
            result[name] = str(error)
            continue
        for _ in range(3):  # the first steps build buckets and are the warm-up of QAdam and PowerSGD
            step()
        dist.barrier()
        before, start, times = sent(), time.perf_counter(), []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        total = time.perf_counter() - start
        result[name] = {"seconds": statistics.median(times), "mean": total / steps, "bytes": (sent() - before) / steps}
        stop()
        dist.barrier()
    if rank == 0:
        Path(output).write_text(json.dumps(result))
    bagua_ref.barrier()
    bagua_ref.destroy_process_group()


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def link(rate: str, steps: int) -> dict[str, dict[str, float] | str]:
    """Connect this namespace to a second one by a link of ``rate``, train over it and return rank 0's figures."""
    other = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    try:
        while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        there = ("nsenter", "-t", str(other.pid), "-n")
        run("ip", "link", "add", "slow", "type", "veth", "peer", "name", "slow", "netns", str(other.pid))
        for rank, inside in enumerate(((), there)):
            run(*inside, "ip", "address", "add", f"{ADDRESSES[rank]}/24", "dev", "slow")
            run(*inside, "ip", "link", "set", "slow", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "tc", "qdisc", "add", "dev", "slow", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "result.json")
            # Only this run uses the namespaces, so any port is free.
            ranks = [
                subprocess.Popen([*inside, sys.executable, __file__, "--work", f"{rank},29500,{steps},{output}"])
                for rank, inside in enumerate(((), there))
            ]
            codes = [process.wait(timeout=900) for process in ranks]
            if any(codes):
                raise SystemExit("a rank failed; see above")
            result: dict[str, dict[str, float] | str] = json.loads(Path(output).read_text())
            return result
    finally:
        # The link would be removed with the namespace, but not at once.
        subprocess.run(["ip", "link", "delete", "slow"], capture_output=True)
        other.kill()
        other.wait()


def main() -> int:
    args = common.arguments(__doc__.partition("\n")[0], work={"default": "", "help": "used by the benchmark itself: one rank"})
    if args.work:
        rank, port, steps, output = args.work.split(",")
        work(int(rank), int(port), int(steps), output)
        return 0
    if "BAGUA_REF_SLOW_LINK" not in os.environ:  # run again, in a network namespace of its own
        if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
            print("slow_link needs Linux with iproute2 and util-linux (ip, tc, unshare, nsenter); nothing was measured")
            return 0
        for flags in ("-Urn", "-n"):  # in a user namespace if that is allowed, else as root
            if subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0:
                environment = {**os.environ, "BAGUA_REF_SLOW_LINK": "1", "OMP_NUM_THREADS": "1"}
                return subprocess.run(["unshare", flags, sys.executable, *sys.argv], env=environment).returncode
        print("slow_link may not create network namespaces; run it as root or allow user namespaces; nothing was measured")
        return 0
    rows = []
    for link_name, (rate, bits) in LINKS.items():
        figures = link(rate, 2 if args.quick else 10 if bits > 5e8 else 5)
        measured = {name: figure for name, figure in figures.items() if isinstance(figure, dict)}
        for name, reason in figures.items():
            if isinstance(reason, str):
                print(f"{name} was not measured: {reason}")
        peers = {name: 1e3 * figure["seconds"] for name, figure in measured.items() if name.startswith(("DDP", "Decent"))}
        better = min(("DDP", "DDP, best settings"), key=peers.__getitem__)
        for name, figure in measured.items():
            bar = common.at_most(1 / BARS[link_name]) if name == "bytegrad" else common.NO_LIMIT
            limit = 1e3 * 8 * figure["bytes"] / bits
            extra = {"limit_ms": limit, "bytes_per_step": figure["bytes"], "mean_ms": 1e3 * figure["mean"]}
            work_name = f"{name}, {link_name} (bytes/bandwidth {limit:.0f} ms)"
            rows.append(common.Row(work_name, "ms/step", 1e3 * figure["seconds"], {better: peers[better]}, better, bar, extra))
    return common.report("slow_link", rows, args)


if __name__ == "__main__":
    sys.exit(main())
