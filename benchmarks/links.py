"""Benchmarks whose ranks run in network namespaces of their own, behind links of a given rate.

def measure(rank: Rank, setting: int) -> object: ...   # on each rank; `rank.slow_down("10mbit")`
sets the rate

sys.exit(links.main(__doc__, measure, report))
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import namespaces
import torch
import torch.distributed as dist

import bagua_ref

RATES = {"10 Mbit/s": ("10mbit", 1e7), "100 Mbit/s": ("100mbit", 1e8), "1 Gbit/s": ("1gbit", 1e9)}
"""What tc calls a link's rate, and bits per second."""
_INSIDE = "BAGUA_REF_OWN_NAMESPACE"
_PORT = 29500  # nothing else uses these namespaces


@dataclass
class Rank:
    """This process's place.

    Args:
        rank, ranks: of this one, and how many there are.
        store: which all share.
    """

    rank: int
    ranks: int
    store: dist.Store

    @property
    def address(self) -> str:
        return namespaces.address(self.rank)

    def slow_down(self, rate: str | None, **limits: str) -> None:
        """Set what each rank can send, see `namespaces.slow_down`; returns when it holds for
        all.
        """
        dist.barrier()
        namespaces.slow_down(rate, **limits)
        dist.barrier()


def launch(ranks: int, request: Any, limit: float = 3600, delay: float = 0.0) -> Any:
    """Run this script once in each of ``ranks`` joined namespaces, and return what `measure`
    returns for ``request`` on rank 0.
    """
    with namespaces.joined(ranks, delay) as nodes, tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "result.json")
        processes = [
            subprocess.Popen(
                [
                    *namespaces.there(node),
                    sys.executable,
                    sys.argv[0],
                    "--work",
                    json.dumps(
                        {"rank": rank, "ranks": ranks, "request": request, "output": output}
                    ),
                ]
            )
            for rank, node in enumerate(nodes)
        ]
        try:
            codes = [process.wait(timeout=limit) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit("a rank failed; see above")
        return json.loads(Path(output).read_text(encoding="utf-8"))


def main(
    what: str,
    measure: Callable[[Rank, Any], Any],
    report: Callable[[argparse.Namespace], int],
    **options: dict,
) -> int:
    """Run as a whole, or, when `launch` has started this process, as one of its ranks."""
    args = common.arguments(
        what.partition("\n")[0],
        work={"default": "", "help": "used by the benchmark itself"},
        **options,
    )
    if args.work:
        _work(measure, **json.loads(args.work))
        return 0
    if _INSIDE not in os.environ:
        try:
            command = namespaces.unshare("tc")
        except namespaces.UnavailableError as error:
            print(f"{Path(sys.argv[0]).stem} {error}; nothing was measured")
            return 0
        environment = {**os.environ, _INSIDE: "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, sys.executable, *sys.argv], env=environment).returncode
    return report(args)


def _work(
    measure: Callable[[Rank, Any], Any], rank: int, ranks: int, request: Any, output: str
) -> None:
    torch.set_num_threads(1)
    places = {
        "RANK": rank,
        "GROUP_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }
    os.environ.update(
        {
            "GLOO_SOCKET_IFNAME": namespaces.DEVICE,
            **{name: str(value) for name, value in places.items()},
        }
    )
    store = dist.TCPStore(namespaces.address(0), _PORT, ranks, is_master=rank == 0)
    bagua_ref.init_process_group(store, rank, ranks)
    result = measure(Rank(rank, ranks, store), request)
    if rank == 0:
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    bagua_ref.barrier()
    bagua_ref.destroy_process_group()
