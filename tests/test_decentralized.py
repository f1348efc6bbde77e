"""Tests of (low-precision) decentralized averaging: operations, training, bad input, checkpoints
(S3.4, S3.5, S5.3, S5.4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.trainings import (
    Scalar,
    batch,
    network,
    on_every_rank,
    sgd,
    simulate,
    train,
    wrap,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.data_parallel import DistributedDataParallel


def one_bucket(
    value: float, count: int = 3, flatten: bool = True, **options: Any
) -> tuple[BaguaBucket, torch.Tensor]:
    tensor = torch.full((count,), value).ensure_bagua_tensor("t")
    return BaguaBucket([tensor], "0", flatten=flatten, **options), tensor


def like(bucket: BaguaBucket) -> torch.Tensor:
    return bucket.flattened_tensor().ensure_bagua_tensor()


# Operations


@pytest.mark.parametrize(
    ("rank", "nranks", "message"),
    [(0, 3, "nranks=3"), (0, 0, "nranks=0"), (4, 4, "rank=4"), (-1, 4, "rank=-1")],
)
def test_shift_one_peer_refuses_what_has_no_peer(rank: int, nranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shift_one_peer(rank, nranks, 0)


@pytest.mark.parametrize("flatten", [True, False])
@on_every_rank(4)
def test_S3_4_the_result_waits_in_peer_weight_and_steps_are_counted(r: int, flatten: bool) -> None:
    bucket, tensor = one_bucket(float(r), flatten=flatten)
    peer_weight = like(bucket)
    op = bucket.append_decentralized_synchronous_op(
        peer_weight, hierarchical=False, peer_selection_mode="shift_one"
    )
    assert bucket._decentralized_op is op
    assert bucket._peer_weight is peer_weight
    assert op.step == 0
    version = tensor._version
    bucket.execute()
    assert op.step == 1
    assert tensor.tolist() == [r] * 3
    assert tensor._version == version, "to autograd, a write during a forward would be a change"
    assert peer_weight.tolist() == [(r + (r + 2) % 4) / 2] * 3
    op.copy_back_peer_weight(bucket)
    first = tensor[0].item()
    bucket.execute()
    op.copy_back_peer_weight(bucket)
    assert [first, *tensor.tolist()] == [
        [1, 1.5, 1.5, 1.5],
        [2, 1.5, 1.5, 1.5],
        [1, 1.5, 1.5, 1.5],
        [2, 1.5, 1.5, 1.5],
    ][r]


@on_every_rank(2)
def test_S3_4_copy_back_goes_where_the_tensors_are_now(r: int) -> None:
    bucket, tensor = one_bucket(float(r), alignment=4)
    op = bucket.append_decentralized_synchronous_op(like(bucket), hierarchical=False)
    bucket.execute()
    tensor.data = torch.zeros(3)
    op.copy_back_peer_weight(bucket)
    assert tensor.tolist() == [0.5] * 3


@on_every_rank(2)
def test_S3_4_copy_back_takes_its_own_bucket(r: int) -> None:
    bucket, _ = one_bucket(1.0)
    op = bucket.append_decentralized_synchronous_op(like(bucket), hierarchical=False)
    bucket.execute()
    with pytest.raises(TypeError, match="bucket='0' must be the BaguaBucket"):
        op.copy_back_peer_weight("0")
    with pytest.raises(ValueError, match="3 elements; bucket '0' has 2"):
        op.copy_back_peer_weight(one_bucket(1.0, count=2)[0])


def bad_replicas() -> list[Any]:
    flat = torch.zeros(3)
    return [
        (lambda b: "weights", TypeError, "must be a torch.Tensor, not str"),
        (lambda b: torch.zeros(3), ValueError, "is not a bagua tensor.*ensure_bagua_tensor"),
        (
            lambda b: torch.zeros(4).ensure_bagua_tensor(),
            ValueError,
            "has 4 elements; with bucket '0' of 3 it must have 3",
        ),
        (
            lambda b: flat.double().ensure_bagua_tensor(),
            TypeError,
            "torch.float64.*bucket '0' of torch.float32",
        ),
        (
            lambda b: torch.zeros(3, device="meta").ensure_bagua_tensor(),
            ValueError,
            "on meta.*device cpu",
        ),
        (lambda b: torch.zeros(6)[::2].ensure_bagua_tensor(), ValueError, "1-D and contiguous"),
        (lambda b: b.tensors[0].view(3).ensure_bagua_tensor(), ValueError, "overlaps bucket '0'"),
    ]


@pytest.mark.parametrize(("make", "error", "message"), bad_replicas())
@on_every_rank(2)
def test_replicas_that_do_not_fit_are_refused_and_the_bucket_stays_usable(
    r: int, make: Callable[[BaguaBucket], Any], error: type[Exception], message: str
) -> None:
    bucket, tensor = one_bucket(1.0)
    with pytest.raises(error, match=f"peer_weight.*{message}"):
        bucket.append_decentralized_synchronous_op(make(bucket), hierarchical=False)
    for place, name in enumerate(("weight", "left_peer_weight", "right_peer_weight")):
        replicas = [like(bucket) for _ in range(3)]
        replicas[place] = make(bucket)
        with pytest.raises(error, match=f"{name}.*{message}"):
            bucket.append_low_precision_decentralized_synchronous_op(*replicas, hierarchical=False)
    shared = like(bucket)
    with pytest.raises(ValueError, match="right_peer_weight overlaps left_peer_weight"):
        bucket.append_low_precision_decentralized_synchronous_op(
            like(bucket), shared, shared, hierarchical=False
        )
    bucket.append_centralized_synchronous_op(average=False)
    bucket.execute()
    assert tensor.tolist() == [2] * 3


@on_every_rank(2)
def test_modes_compressions_and_dtypes_that_do_not_exist_here_are_refused(r: int) -> None:
    bucket, _ = one_bucket(1.0)
    with pytest.raises(
        ValueError, match=r"peer_selection_mode='some' must be 'all', 'shift_one', .* or a function"
    ):
        bucket.append_decentralized_synchronous_op(like(bucket), peer_selection_mode="some")
    for compression in (None, "zip"):
        with pytest.raises(
            ValueError, match=f"compression={compression!r} is not a known codec; it must be one of"
        ):
            bucket.append_low_precision_decentralized_synchronous_op(
                like(bucket), like(bucket), like(bucket), compression=compression
            )
    for dtype in (torch.float64, torch.int32):
        other = BaguaBucket(
            [torch.ones(2, dtype=dtype).ensure_bagua_tensor("t")], "1", flatten=True
        )
        with pytest.raises(
            TypeError, match=f"float16, bfloat16 or float32, not bucket '1''s {dtype}"
        ):
            other.append_low_precision_decentralized_synchronous_op(
                like(other), like(other), like(other)
            )
    with pytest.raises(TypeError, match=r"torch\.int32"):
        other.append_decentralized_synchronous_op(like(other))


@pytest.mark.parametrize("operation", ["shift_one", "ring"])
@on_every_rank(4, nodes=(2, 2))
def test_S3_3_before_pairs_and_rings_the_leader_gathers_instead_of_letting_the_library_reduce(
    r: int, operation: str
) -> None:
    bucket, _ = one_bucket(1.0)
    group = bagua_ref.groups.communication._get_default_group().for_background()
    if operation == "ring":
        bucket.append_low_precision_decentralized_synchronous_op(
            like(bucket), like(bucket), like(bucket), group=group
        )
    else:
        bucket.append_decentralized_synchronous_op(
            like(bucket), peer_selection_mode="shift_one", group=group
        )
    before = group.get_intra_node_communicator().bytes_sent
    bucket.execute()
    # Three float32 numbers to the leader; of the leader's messages only the ring's broadcast
    # counts, half on each rank.
    assert (
        group.get_intra_node_communicator().bytes_sent - before
        == ([6, 18, 6, 18] if operation == "ring" else [0, 12, 0, 12])[r]
    )


# Algorithms: rounds of communication


def twice(module: nn.Module, forward: Callable[[int], torch.Tensor]) -> None:
    loss = forward(0)
    loss.backward(retain_graph=True)
    loss.backward()


def in_order(module: nn.Module, forward: Callable[[int], torch.Tensor]) -> None:
    first, second = forward(0), forward(1)
    first.backward()
    second.backward()


def reversed_order(module: nn.Module, forward: Callable[[int], torch.Tensor]) -> None:
    first, second = forward(0), forward(1)
    second.backward()
    first.backward()


def penalty_first(module: nn.Module, forward: Callable[[int], torch.Tensor]) -> None:
    loss = forward(0)
    sum(p.square().sum() for p in module.parameters()).backward()
    loss.backward()


REMEDY = (
    r"replaces the weights by their average.*Add the losses and call backward\(\) once.*no_sync"
)


@pytest.mark.parametrize("use", [twice, in_order, reversed_order, penalty_first])
@on_every_rank(2)
def test_S5_3_the_context_refuses_a_graph_of_before_the_copy_back(r: int, use: Any) -> None:
    module = network()
    module.step = lambda x: module.forward(x).square().mean()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    algorithm = DecentralizedAlgorithm(hierarchical=False)
    with pytest.raises(RuntimeError, match=REMEDY), bagua_ref.train(module, [optimizer], algorithm):
        use(module, lambda step: module.step(batch(r, step).requires_grad_()))
    assert not module._forward_hooks


@pytest.mark.parametrize(  # nothing shows a checkpoint to the context
    ("form", "checkpointed"),
    [("flat", False), ("flat", True), ("not flat", False), ("wrapper", True)],
)
@pytest.mark.parametrize("use", [twice, in_order, reversed_order, penalty_first])
@on_every_rank(2)
def test_S5_3_a_graph_of_before_the_copy_back_is_refused_with_the_remedy(
    r: int, use: Any, form: str, checkpointed: bool
) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    algorithm = DecentralizedAlgorithm(hierarchical=False)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return module(x).square().mean()

    def forward(step: int) -> torch.Tensor:
        x = batch(r, step).requires_grad_()
        return checkpoint(loss_of, x, use_reentrant=False) if checkpointed else loss_of(x)

    if form == "wrapper":
        DistributedDataParallel(module, optimizers=[optimizer], algorithm=algorithm)
    else:
        module.with_bagua([optimizer], algorithm, do_flatten=form == "flat")
    with pytest.raises(RuntimeError, match=REMEDY):
        use(module, forward)
    optimizer.zero_grad()
    train(module, optimizer, r, range(2))  # training goes on
    with module.no_sync():  # as the message says
        use(module, forward)
    (forward(0) + forward(1)).backward()
    optimizer.step()
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    use(module, forward)


@on_every_rank(2)
def test_S5_3_where_nothing_is_averaged_a_graph_can_be_used_again(r: int) -> None:
    module = network()
    module.with_bagua([], DecentralizedAlgorithm(hierarchical=False, communication_interval=2))
    module(batch(r, 0)).sum().backward()
    loss = module(batch(r, 1)).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)


@on_every_rank(2)
def test_S5_3_no_sync_and_evaluation_do_not_average_but_no_sync_counts_steps(r: int) -> None:
    module = Scalar()
    module.with_bagua([], DecentralizedAlgorithm(communication_interval=2))
    op = module.bagua_buckets[0]._decentralized_op
    seen = []

    def step(x: float = 1.0) -> None:
        module(x).backward()
        seen.append(op.step)

    step()  # 0: averages
    with module.no_sync():
        step()  # 1
        step()  # 2: would average
    module.eval()
    step()
    module.train()
    step()  # 3
    step()  # 4: averages
    assert seen == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_S2_3_weights_that_have_moved_come_back_before_the_forward_uses_them(seed: int) -> None:
    def rank(r: int) -> None:
        module = network()
        module.with_bagua([], DecentralizedAlgorithm())
        flat = []
        module.register_forward_pre_hook(
            lambda *_: flat.append(module.bagua_buckets[0].check_flatten())
        )
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        assert not module.bagua_buckets[0].check_flatten()
        module(batch(r, 0)).sum().backward()
        assert flat == [True]

    simulate(1, rank, seed=seed)


def averagings(module: nn.Module) -> Callable[[], int]:
    """Count the runs of the ring."""
    count = []
    for bucket in module.bagua_buckets:
        (op,) = bucket._ops
        bucket._ops[0] = lambda x, op=op: (op(x), count.append(1))
    return lambda: len(count)


@on_every_rank(2)
def test_S5_4_the_interval_counts_optimizer_steps_also_under_gradient_accumulation(r: int) -> None:
    module, optimizer = wrap(
        Scalar(), LowPrecisionDecentralizedAlgorithm(communication_interval=2), lr=1.0
    )
    done = averagings(module)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        # Two forwards per step: counting forwards would only ever see even numbers.
        module(1.0).backward()
        module(1.0).backward()
        optimizer.step()
        seen.append(done())
    module.eval()
    optimizer.step()
    assert done() == 3
    assert seen == [1, 1, 2, 2, 3]


@on_every_rank(2)
def test_S5_4_after_the_last_of_several_optimizers(r: int) -> None:
    module = network()
    first, last = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (module[0], module[2]))
    module.with_bagua([first, last], LowPrecisionDecentralizedAlgorithm())
    done = averagings(module)
    for step in range(3):
        module(batch(r, step)).sum().backward()
        first.step()
        assert done() == step
        last.step()
        assert done() == step + 1


# Bad input to algorithms


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)


def fused(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(module)
    optimizer._bagua_fused_optimizer = object()
    return optimizer


@pytest.mark.parametrize(
    ("make", "optimizers", "algorithm", "error", "message"),
    [
        (
            network,
            lambda m: [],
            "low_precision_decentralized",
            ValueError,
            "'0.weight', '0.bias', '2.weight', '2.bias'.*to_ignore",
        ),
        (
            network,
            lambda m: [sgd(m[0])],
            "low_precision_decentralized",
            ValueError,
            "holds '2.weight', '2.bias'; .*to_ignore",
        ),
        (
            network,
            lambda m: [fused(m)],
            "low_precision_decentralized",
            ValueError,
            "fused SGD.*without fuse_optimizer",
        ),
        (
            Wide,
            lambda m: [sgd(m)],
            "low_precision_decentralized",
            TypeError,
            "float16, bfloat16 or float32, not bucket '1''s.*float64",
        ),
    ],
)
@on_every_rank(3, nodes=(1, 1, 1))
def test_what_cannot_be_trained_is_refused_on_every_rank_when_wrapping(
    r: int, make: Any, optimizers: Any, algorithm: str, error: type[Exception], message: str
) -> None:
    module = make()
    with pytest.raises(error, match=message):
        module.with_bagua(optimizers(module), Algorithm.init(algorithm))
    module.with_bagua([], GradientAllReduceAlgorithm())


# Wrapping again


def test_S5_a_failed_attempt_to_wrap_anew_leaves_replicas_right() -> None:
    def rank(r: int) -> list[torch.Tensor]:
        module, optimizer = wrapped(
            LowPrecisionDecentralizedAlgorithm(hierarchical=False, communication_interval=2)
        )
        train(module, optimizer, r, range(4))
        with pytest.raises(ValueError, match="shift_one"):
            module.with_bagua(
                [optimizer],
                DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one"),
            )
        train(module, optimizer, r, range(4, 6))
        # before anything was broadcast
        with pytest.raises(ValueError, match="differ between ranks"):
            module.with_bagua([optimizer] if r else [], DecentralizedAlgorithm())
        assert torch.equal(
            module.bagua_buckets[0]._weight, module.bagua_buckets[0].flattened_tensor()
        )
        train(module, optimizer, r, range(6, 9))
        bucket = module.bagua_buckets[0]
        return [bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight]

    results = simulate(3, rank)
    assert not torch.equal(results[0][0], results[1][0])
    for r, (_, left, right) in enumerate(results):
        assert_equal(left, results[r - 1][0], EXACT)
        assert_equal(right, results[(r + 1) % 3][0], EXACT)
