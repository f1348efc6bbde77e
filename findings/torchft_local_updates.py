"""torchft's LocalSGD and DiLoCo, beside the expected values of S9 computed from the same
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.contenders import TorchFT
from findings import simulated
from findings.common import DIFFERS, RANKS, Row, first_difference, gradients, judged, on_ranks
from torch import nn

from bagua_ref.conformance.expected.local_updates_numpy import DiLoCo, local_sgd
from bagua_ref.conformance.expected.tolerances import SUM

PEER = "torchft==0.2.0"
SIZES, STEPS, PERIOD, LR = [8, 8, 8, 8], 8, 4, 0.125
GIVEN = (
    "2 ranks, 4 parameters of 8 float32 in 2 fragments' modules, N(0, 1) gradients, period"
    f" {PERIOD}, inner SGD({LR})"
)


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(
    method: str, fragments: int, shared: bool, init_sync: bool, options: dict[str, Any]
) -> list[list[torch.Tensor]]:
    """Train on the calling rank; return its weights after each step."""
    rank = dist.get_rank()
    around = TorchFT("127.0.0.1", rank, RANKS, dist.distributed_c10d._get_default_store())
    from torchft import local_sgd as torchft  # after TorchFT has chosen what it logs

    halves = [
        nn.ParameterList(nn.Parameter(torch.ones(size)) for size in half)
        for half in (SIZES[:2], SIZES[2:])
    ]
    model = nn.ModuleList(halves)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=LR)
    with around.manager(model, optimizer, init_sync=init_sync) as manager:
        if method == "local_sgd":
            training = torchft.LocalSGD(manager, model, optimizer, PERIOD)
        else:
            modules = halves if fragments == 2 else [model]
            outers = (
                outer(weights) if shared else [outer(module.parameters()) for module in modules]
            )
            training = torchft.DiLoCo(manager, modules, optimizer, outers, PERIOD, **options)
        history = []
        with training:
            for of_ranks in gradients(SIZES, STEPS):
                for w, g in zip(weights, of_ranks[rank], strict=True):
                    w.grad = g.clone()
                optimizer.step()
                history.append([w.detach().clone() for w in weights])
        dist.barrier()
    return history


def complaint(
    method: str,
    fragments: int = 1,
    *,
    shared: bool = False,
    init_sync: bool = False,
    **options: Any,
) -> str | None:
    """Return where the weights of torchft leave those of S9."""
    found = on_ranks(train, method, fragments, shared, init_sync, options)
    start = [torch.ones(size).numpy() for size in SIZES]
    given = [[[g.numpy() for g in rank] for rank in step] for step in gradients(SIZES, STEPS)]
    dtypes = ["float32"] * len(SIZES)
    if method == "local_sgd":
        wanted: list[Any] = local_sgd(start, given, LR, dtypes, [RANKS], period=PERIOD)
    else:
        places = [[0, 1], [2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
        delay, mix = (
            options.get("fragment_sync_delay", 0),
            options.get("fragment_update_alpha", 0.0),
        )
        plain = DiLoCo(start, RANKS, LR, dtypes, places, outer, period=PERIOD, delay=delay, mix=mix)
        wanted = []
        for step in given:
            plain.step(step)
            wanted.append(plain.ranks)
    return first_difference(found, wanted, SUM(32))


PROGRAM = """
from torchft.local_sgd import DiLoCo, LocalSGD


class Manager:  # all ranks are alive, and no step fails
    _use_async_quorum, steps = False, 0

    def allreduce(self, tensor, should_quantize=False):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor /= world
        return work

    def should_commit(self):
        self.steps += 1
        return True

    def current_step(self):
        return self.steps

    start_quorum = disallow_state_dict_read = allow_state_dict_read = register_state_dict_fn = lambda self, *args: None


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
with {training}:
    train(model, optimizer, 4)
"""
TRAININGS = {
    "LocalSGD": "LocalSGD(Manager(), model, optimizer, 2)",
    "DiLoCo": "DiLoCo(Manager(), [model], optimizer, outer, 2)",
}


def find() -> Iterator[Row]:
    for kind, training in TRAININGS.items():
        name, given = (
            f"torchft {kind} ({PEER})",
            "two Linear layers, SGD(0.1), period 2, a manager in Python whose quorum never changes",
        )
        yield simulated.simulated(
            name, "training", PROGRAM.format(training=training), given=f"{given}, 4 steps"
        )
    local, diloco = f"torchft LocalSGD ({PEER})", f"torchft DiLoCo ({PEER})"
    yield judged(local, "S9.1", "init_sync=False", complaint("local_sgd"), given=GIVEN)
    heals = {
        "why": (
            "The first averaging begins with a synchronisation of all ranks from one of them, which"
            " replaces what the others have trained so far; the specification averages the weights"
            " of all."
        ),
        "promise": (
            "The manager documents `init_sync`, True by default: weights are synchronised at step"
            " 0, and False is for ranks that start with equal weights. That step 0 ends with the"
            " first averaging, and not before training, is not said."
        ),
        "effect": "The first period of all ranks but one is lost.",
        "given": GIVEN,
    }
    yield judged(
        local,
        "S9.1",
        "first averaging, default init_sync",
        complaint("local_sgd", init_sync=True),
        DIFFERS,
        **heals,
    )
    yield judged(diloco, "S9.4", "one fragment, init_sync=False", complaint("diloco"), given=GIVEN)
    yield judged(
        diloco,
        "S9.4",
        "first round, default init_sync",
        complaint("diloco", init_sync=True),
        DIFFERS,
        **heals,
    )
    streamed = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.25}
    yield judged(
        diloco,
        "S9.4",
        "two fragments, delay 1, mix 0.25",
        complaint("diloco", 2, **streamed),
        given=GIVEN,
    )
    yield judged(
        diloco,
        "S9.3",
        "two fragments, one outer optimizer of all parameters",
        complaint("diloco", 2, shared=True),
        why=(
            "When the outer optimizer of one fragment steps, it also steps the other fragments'"
            " weights, with the inner gradients left in them and at the outer learning rate."
        ),
        promise=(
            "`outer_optimizer` may be one optimizer or a list of one for each fragment; a comment"
            " says that one alone is kept for compatibility. The number of fragments that it suits"
            " is not limited."
        ),
        given=GIVEN,
        effect=(
            "Local gradients, at the outer learning rate, move weights in each period, differently"
            " on each rank."
        ),
    )
    promise = "`use_bucketization` is described as a more efficient way to average the same values."
    yield judged(
        diloco,
        "S9.5",
        "use_bucketization=True, one bucket",
        complaint("diloco", use_bucketization=True),
        given=GIVEN,
    )
    with_buckets = {"use_bucketization": True, "bucket_cap_mb": 64 / 2**20}
    yield judged(
        diloco,
        "S9.5",
        "use_bucketization=True, two buckets of two tensors each",
        complaint("diloco", **with_buckets),
        why=(
            "Only the last bucket's mean is copied back: all callbacks share the variables of the"
            " last turn of the loop."
        ),
        promise=promise,
        given=f"{GIVEN}, bucket_cap_mb=64 / 2**20 (64 bytes)",
        effect=(
            "Outer gradients of all other buckets stay local, so the ranks' global weights drift"
            " apart."
        ),
    )
    with_buckets = {"use_bucketization": True, "bucket_cap_mb": 16 / 2**20}
    yield judged(
        diloco,
        "S9.5",
        "use_bucketization=True, tensors larger than a bucket",
        complaint("diloco", **with_buckets),
        why=(
            "A tensor that is larger than its bucket is put into none: buffers of zeros are"
            " averaged, and the tensor never is."
        ),
        promise=promise,
        given=f"{GIVEN}, bucket_cap_mb=16 / 2**20 (16 bytes)",
        effect="Such tensors are trained on local differences only.",
    )
    yield Row(
        diloco,
        "S9.5",
        "should_quantize=True",
        "not judged",
        "by its source, the option has no effect where Triton is missing, as it is without a GPU",
    )
