"""Trainings that a benchmark compares: algorithms of bagua_ref, torch's own ways, torchft and
Decent-DP.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.algorithms import Algorithm, QAdamOptimizer

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def nothing() -> None:
    pass


@dataclass
class Training:
    """A module under one contender.

    Args:
        forward: the module to call.
        zero_grad: sets gradients to None.
        update: what follows the backward pass.
        weights: shows, as a context, the weights to be judged in the module that was passed.
        stop: ends it, on all ranks.
        options: the algorithm that the module was wrapped with, if it is ours.
    """

    forward: nn.Module
    zero_grad: Callable[[], None]
    update: Callable[[], None]
    weights: Callable[[], Any] = nullcontext
    stop: Callable[[], None] = nothing
    options: Any = None

    def step(self, x: Tensor, y: Tensor) -> None:
        self.zero_grad()
        nn.functional.cross_entropy(self.forward(x).flatten(0, -2), y.flatten()).backward()
        self.update()


@dataclass(frozen=True)
class Outer:
    """The settings of DiLoCo: steps per period, modules that are sent one after the other, delay
    and mix of S9.2.
    """

    period: int
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0


def plain(module: nn.Module, make: Make) -> Training:
    optimizer = make(list(module.parameters()))
    return Training(module, optimizer.zero_grad, optimizer.step)


def qadam(parameters: Iterable[nn.Parameter]) -> QAdamOptimizer:
    # After so short a warm-up v is near zero: without a large eps training would diverge, and NaN
    # be what is timed.
    return QAdamOptimizer(parameters, lr=1e-6, eps=1e-3, warmup_steps=2)


def ours(name: str, module: nn.Module, make: Make, **arguments: Any) -> Training:
    if name == "qadam":
        optimizer = arguments["q_adam_optimizer"] = qadam(module.parameters())
    else:
        optimizer = make(list(module.parameters()))
    options = Algorithm.init(name, **arguments)
    module.with_bagua([optimizer], options)
    algorithm = module.bagua_algorithm
    return Training(
        module,
        optimizer.zero_grad,
        optimizer.step,
        weights=algorithm.global_weights if name == "diloco" else nullcontext,
        stop=(lambda: algorithm.abort(module)) if name == "async" else nothing,
        options=options,
    )


def our_diloco(module: nn.Sequential, make: Make, outer: Outer) -> Training:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    fragments = [
        [names[id(parameter)] for parameter in part.parameters()]
        for part in parts(module, outer.fragments)
    ]
    return ours(
        "diloco",
        module,
        make,
        period=outer.period,
        fragments=fragments,
        delay=outer.delay,
        mix=outer.mix,
    )


def ddp(module: nn.Module, make: Make, hook: str = "", **settings: Any) -> Training:
    wrapped = DistributedDataParallel(module, **settings)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD":
        wrapped.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook
        )
    optimizer = make(list(module.parameters()))
    return Training(wrapped, optimizer.zero_grad, optimizer.step)


def averager(module: nn.Module, make: Make, period: int) -> Training:
    """Torch's PeriodicModelAverager, which averages after steps 1, 1 + period, ..."""
    training, averages = plain(module, make), PeriodicModelAverager(period)
    step = training.update

    def update() -> None:
        step()
        averages.average_parameters(module.parameters())

    training.update = update
    return training


def decent(module: nn.Module, make: Make) -> Training:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    wrapped = DecentralizedDataParallel(
        module, lambda named: make([parameter for _, parameter in named])
    )
    return Training(wrapped, nothing, nothing)


def parts(module: nn.Sequential, count: int) -> list[nn.Sequential]:
    """Return ``count`` runs of the children that have parameters, with about equally many each, as
    S9.3 splits parameters.
    """
    children = [child for child in module if any(True for _ in child.parameters())]
    sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in children]
    runs: list[list[nn.Module]] = [[] for _ in range(count)]
    before, place = 0, -1
    for number, (child, size) in enumerate(zip(children, sizes, strict=True)):
        middle = math.floor(count * (before + size / 2) / sum(sizes))
        place = max(min(middle, place + 1, count - 1), count - len(children) + number)
        runs[place].append(child)
        before += size
    return [nn.Sequential(*run) for run in runs]


@dataclass
class TorchFT:
    """What torchft needs beside torch: a lighthouse on rank 0, and for each rank a store and a
    manager.

    Args:
        address: of this rank, for the others.
        rank, ranks: of this one, and how many there are.
        store: where rank 0 tells the lighthouse's address.
    """

    address: str
    rank: int
    ranks: int
    store: dist.Store
    lighthouse: Any = field(default=None, init=False)
    _made: ClassVar[Iterator[int]] = itertools.count()

    def __post_init__(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # it reports each message otherwise
        from torchft.coordination import LighthouseServer

        logging.disable(logging.WARNING)
        self.key = f"lighthouse {next(self._made)}"
        if self.rank == 0:
            self.lighthouse = LighthouseServer("[::]:0", self.ranks, join_timeout_ms=100)
            port = self.lighthouse.address().rpartition(":")[2]
            self.store.set(self.key, f"http://{self.address}:{port}")

    @contextmanager
    def manager(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, init_sync: bool = True
    ) -> Iterator[Any]:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        limit = timedelta(minutes=5)
        own = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)

        def load(state: dict[str, Any]) -> None:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])

        manager = Manager(
            ProcessGroupGloo(limit),
            load,
            lambda: {"module": module.state_dict(), "optimizer": optimizer.state_dict()},
            self.ranks,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=self.address,
            store_port=own.port,
            lighthouse_addr=self.store.get(self.key).decode(),
            replica_id=str(self.rank),
            hostname=self.address,
            init_sync=init_sync,
        )
        try:
            yield manager
        finally:
            manager.shutdown(wait=False)

    def diloco(self, module: nn.Sequential, make: Make, outer: Outer) -> Training:
        from torchft.local_sgd import DiLoCo

        optimizer = make(list(module.parameters()))
        held = self.manager(module, optimizer)
        fragments = parts(module, outer.fragments)
        outers = [
            torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for part in fragments
        ]
        diloco = DiLoCo(
            held.__enter__(),
            fragments,
            optimizer,
            outers,
            outer.period,
            fragment_sync_delay=outer.delay,
            fragment_update_alpha=outer.mix,
        )
        diloco.__enter__()

        @contextmanager
        def weights() -> Iterator[None]:
            local = [parameter.detach().clone() for parameter in module.parameters()]
            for fragment in diloco._fragments:
                fragment.restore_parameters()
            yield
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), local, strict=True):
                    parameter.copy_(value)

        def stop() -> None:
            diloco.__exit__(None, None, None)
            held.__exit__(None, None, None)

        return Training(module, optimizer.zero_grad, optimizer.step, weights, stop)


warnings.filterwarnings("ignore", category=FutureWarning)
