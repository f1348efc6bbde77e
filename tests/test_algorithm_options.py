"""What algorithms refuse: bad options, options that differ between ranks, and states that do not
fit, which change nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.algorithms import CASES, Run, assert_same, optimizer_for
from tests.trainings import network, on_every_rank, simulate

from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DemoAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopKAlgorithm,
)

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
"""The parameters of `network`."""
NAN = float("nan")
MODES = r"must be 'all', 'shift_one', .*'exponential' or a function \(t, n\) -> graph"
UNKNOWN = (
    "compression='MXFP9' is not a known codec; it must be one of .*'MXFP4', 'MXFP4-CEIL', .*'NVFP4'"
)
ADAM = QAdamOptimizer([torch.nn.Parameter(torch.ones(1))])

SPARSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"top_k": 0}, ValueError, "top_k=0 must be 1 or more"),
    ({"top_k": 1.0}, TypeError, "top_k=1.0 must be an int, 1 or more"),
    ({"top_k": True}, TypeError, "top_k=True must be an int"),
    ({"top_k": 4, "chunk": 0}, ValueError, "chunk=0 must be 1 or more"),
    ({"top_k": 4, "chunk": 65}, ValueError, "chunk=65 must be at most 64"),
    ({"top_k": 4, "mean": "some"}, ValueError, "mean='some' must be one of 'all', 'contributors'"),
    (
        {"top_k": 4, "compression": "Stat3"},
        ValueError,
        "compression='Stat3' is not a known codec; it must be one of None, .*'Stat2'",
    ),
]

BAD: dict[type[Algorithm], list[tuple[dict[str, Any], type[Exception], str]]] = {
    AsyncModelAverageAlgorithm: [
        (
            {"peer_selection_mode": "shift_one"},
            ValueError,
            "peer_selection_mode='shift_one' must be 'all'",
        ),
        ({"sync_interval_ms": -1}, ValueError, "sync_interval_ms=-1"),
        ({"sync_interval_ms": NAN}, ValueError, "sync_interval_ms=nan"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps=1.5"),
    ],
    GradientAllReduceAlgorithm: [
        ({"hierarchical": "False"}, TypeError, "hierarchical='False' must be True or False"),
        ({"average": 0}, TypeError, "average=0 must be True or False"),
    ],
    ByteGradAlgorithm: [
        ({"error_feedback": 1}, TypeError, "error_feedback=1 must be True or False"),
        ({"hierarchical": None}, TypeError, "hierarchical=None must be True or False"),
        ({"compression": "MXFP9"}, ValueError, UNKNOWN),
    ],
    QAdamAlgorithm: [({"q_adam_optimizer": ADAM, "compression": "MXFP9"}, ValueError, UNKNOWN)],
    DecentralizedAlgorithm: [
        *(
            ({"peer_selection_mode": mode}, ValueError, MODES)
            for mode in ("some", "", None, 3, ["ring"])
        ),
        ({"communication_interval": 0}, ValueError, "communication_interval=0 must be 1 or more"),
        ({"communication_interval": 1.0}, TypeError, "communication_interval=1.0 must be an int"),
    ],
    LowPrecisionDecentralizedAlgorithm: [
        ({"communication_interval": 0}, ValueError, "communication_interval=0"),
        ({"communication_interval": "1"}, TypeError, "communication_interval='1'"),
        ({"hierarchical": 1}, TypeError, "hierarchical=1 must be True or False"),
        ({"compression": "MXFP9"}, ValueError, UNKNOWN),
    ],
    LocalSGDAlgorithm: [
        ({"period": 0}, ValueError, "period=0 must be 1 or more"),
        ({"period": 2.5}, TypeError, "period=2.5 must be an int, 1 or more"),
        ({"period": 3, "warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
        (
            {"period": 3, "offset": 3},
            ValueError,
            "offset=3 must be from 0 to 2, less than period=3",
        ),
        ({"period": 3, "offset": -1}, ValueError, "offset=-1 must be 0 or more"),
        ({"period": 3, "hierarchical": 1}, TypeError, "hierarchical=1 must be True or False"),
    ],
    DiLoCoAlgorithm: [
        ({"period": 0}, ValueError, "period=0 must be 1 or more"),
        ({"period": "8"}, TypeError, "period='8' must be an int"),
        (
            {"period": 9, "fragments": 2},
            ValueError,
            "period=9 must be a multiple of the number of fragments, 2",
        ),
        (
            {"period": 8, "fragments": 2, "delay": 4},
            ValueError,
            "delay=4 must be less than gap=4, the period=8 divided",
        ),
        ({"period": 8, "delay": -1}, ValueError, "delay=-1 must be 0 or more"),
        ({"mix": 1.01}, ValueError, "mix=1.01 must be at least 0 and at most 1"),
        ({"mix": NAN}, ValueError, "mix=nan must be at least 0"),
        ({"mix": "half"}, TypeError, "mix='half' must be a number"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
        ({"fragments": 0}, ValueError, "fragments=0 must be 1 or more"),
        ({"fragments": []}, ValueError, r"fragments=\[\] must hold at least one list"),
        ({"fragments": [["a"], []]}, ValueError, "each list at least one parameter name"),
        (
            {"fragments": ["a", "b"]},
            TypeError,
            "must be an int, or a list of lists of parameter names",
        ),
        ({"fragments": [[1]]}, TypeError, "must be an int, or a list of lists of parameter names"),
        (
            {"outer_optimizer": "sgd"},
            TypeError,
            "outer_optimizer='sgd' must be None, or make an optimizer",
        ),
        ({"compression": "MXFP9"}, ValueError, UNKNOWN),
        (
            {"error_feedback": True},
            ValueError,
            "error_feedback=True keeps what compression leaves out, and compression is None",
        ),
        ({"error_feedback": 1}, TypeError, "error_feedback=1 must be True or False"),
        *SPARSE,
        ({"top_k": 4, "error_decay": 1.01}, ValueError, "error_decay=1.01 must be at least 0"),
        ({"top_k": 4, "error_decay": NAN}, ValueError, "error_decay=nan must be at least 0"),
        (
            {"top_k": 4, "compression": "MXFP4", "error_feedback": True},
            ValueError,
            "error_feedback=True with top_k=4: top_k has an error memory of its own",
        ),
        ({"compression": "Stat2"}, ValueError, "compression='Stat2' needs top_k, which is None"),
        ({"mean": "contributors"}, ValueError, "mean='contributors' needs top_k, which is None"),
    ],
    DemoAlgorithm: [
        *SPARSE,
        ({"top_k": None}, TypeError, "top_k=None must be an int, 1 or more"),
        ({"decay": -0.1}, ValueError, "decay=-0.1 must be at least 0 and at most 1"),
        ({"decay": "1"}, TypeError, "decay='1' must be a number"),
        ({"transform": "fft"}, ValueError, "transform='fft' must be one of 'dct', None"),
        ({"sign": 1}, TypeError, "sign=1 must be True or False"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
    ],
    PowerSGDAlgorithm: [
        (
            {"matrix_approximation_rank": 0},
            ValueError,
            "matrix_approximation_rank=0 must be 1 or more",
        ),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
        (
            {"min_compression_rate": 0},
            ValueError,
            "min_compression_rate=0 must be above 0 and finite",
        ),
        (
            {"min_compression_rate": "2"},
            TypeError,
            "min_compression_rate='2' must be a number above 0",
        ),
        (
            {"memory": "global"},
            ValueError,
            "memory='global' must be one of 'local', 'averaged', None",
        ),
        ({"warm_start": 1}, TypeError, "warm_start=1 must be True or False"),
        ({"seed": -1}, ValueError, "seed=-1 must be 0 or more"),
        ({"seed": 2**32}, ValueError, r"seed=4294967296 must be below 2\*\*32"),
    ],
    TopKAlgorithm: [
        ({"ratio": 0}, ValueError, "ratio=0 must be above 0 and at most 1"),
        ({"ratio": NAN}, ValueError, "ratio=nan must be above 0 and at most 1"),
        ({"ratio": True}, TypeError, "ratio=True must be a number"),
        ({"error_feedback": None}, TypeError, "error_feedback=None must be True or False"),
    ],
}


@pytest.mark.parametrize(
    ("algorithm", "options", "error", "message"),
    [(algorithm, *row) for algorithm, rows in BAD.items() for row in rows],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_bad_options_are_refused_by_name(
    algorithm: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        algorithm(**options)


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gradient_allreduce", {"average": True}, {"average": False}),
    ("bytegrad", {"error_feedback": True}, {"error_feedback": False}),
    ("decentralized", {"communication_interval": 1}, {"communication_interval": 2}),
    (
        "decentralized",
        {"peer_selection_mode": "all"},
        {"peer_selection_mode": lambda t, n: [[(r, 1.0)] for r in range(n)]},
    ),
    ("async", {"warmup_steps": 0}, {"warmup_steps": 3}),
    ("qadam", {"error_feedback": True}, {"error_feedback": False}),
    ("diloco", {"fragments": [NAMES[:1], NAMES[1:]]}, {"fragments": [NAMES[:2], NAMES[2:]]}),
    (
        "diloco",
        {"compression": "MXFP8", "error_feedback": True},
        {"compression": "MXFP8", "error_feedback": False},
    ),
    ("diloco", {"top_k": 4}, {"top_k": None}),
    ("diloco", {"top_k": 4, "mean": "all"}, {"top_k": 4, "mean": "contributors"}),
    ("demo", {"transform": "dct"}, {"transform": None}),
    ("demo", {"compression": "Stat2"}, {"compression": "OneBit"}),
    ("powersgd", {"matrix_approximation_rank": 1}, {"matrix_approximation_rank": 2}),
]


@pytest.mark.parametrize(
    ("name", "first", "others"),
    DIFFERENT,
    ids=[f"{name}, {[*given][-1]}" for name, given, _ in DIFFERENT],
)
@on_every_rank(3)
def test_an_option_that_differs_between_ranks_is_an_error_on_every_rank(
    r: int, name: str, first: dict[str, Any], others: dict[str, Any]
) -> None:
    module: Any = network()
    optimizer = optimizer_for(name, module.parameters())
    options = {
        **(others if r else first),
        **({"q_adam_optimizer": optimizer} if name == "qadam" else {}),
    }
    with pytest.raises(
        ValueError, match=f"rank 0 has algorithm: .*{[*first][-1]}.*, ranks 1, 2 have algorithm: "
    ):
        module.with_bagua([optimizer], Algorithm.init(name, **options))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "powersgd", "topk", "demo"])
@on_every_rank(1)
def test_an_algorithm_that_counts_steps_needs_the_optimizers(r: int, name: str) -> None:
    options = {"warmup_steps": 1} if name in ("powersgd", "topk", "demo") else {"period": 2}
    with pytest.raises(ValueError, match=rf"optimizers=\[\]: {name} .*counts the steps"):
        network().with_bagua([], Algorithm.init(name, **options))  # type: ignore[operator]


VERSION = (
    lambda s: s.update(version=9),
    "state has version 9; this version of bagua_ref reads version 1",
)
STREAMING = "diloco, streaming"
UNFIT: dict[str, list[tuple[Any, str]]] = {
    STREAMING: [
        VERSION,
        (lambda s: s.pop("version"), r"state is not one of \w+: it lacks .*version"),
        (lambda s: s.pop("outer_steps"), "state is not one of diloco: it lacks outer_steps"),
        (lambda s: s.pop("in_flight"), "state is not one of diloco: it lacks in_flight"),
        (
            lambda s: s.update(steps_of_optimizers=[3, 3]),
            "state was saved with 2 optimizers, and this training has 1",
        ),
        (
            lambda s: s.update(fragments=[NAMES]),
            "state was saved with fragments .*, and this training has",
        ),
        (
            lambda s: s["global_weights"].pop("2.bias"),
            r"global_weights of another model: it lacks \['2.bias'\]",
        ),
        (
            lambda s: s["global_weights"].update(x=torch.ones(1)),
            r"global_weights of another model: it lacks none, and \['x'\]",
        ),
        (
            lambda s: s["global_weights"].update({"0.bias": torch.ones(9)}),
            "'0.bias' is .*9.* there and .*8.* here",
        ),
        (
            lambda s: s["outer_optimizers"][1]["param_groups"][0]["params"].append(7),
            "the outer optimizer of fragment 1: its groups have",
        ),
        (
            lambda s: s["in_flight"][0].update(due=5),
            "fragment 0 in flight, to be applied after step 5, which fits no step",
        ),
        (
            lambda s: s["in_flight"][0].update(fragment=1),
            "fragment 1 in flight, to be applied after step 4, which fits no step",
        ),
        (
            lambda s: s["in_flight"][0]["mean"].update({"0.weight": torch.ones(8, 6).double()}),
            "the mean in flight that are not this",
        ),
        (
            lambda s: s.update(steps_of_optimizers=[0]),
            "saved in the local phase, after step 0; warmup_steps=1 does not fit",
        ),
        (
            lambda s: s.update(has_global_weights=False),
            "saved in the warm-up, after step 3; warmup_steps=1 does not fit",
        ),
    ],
    "local_sgd": [(lambda s: s.pop("version"), r"state is not one of \w+: it lacks .*version")],
    "powersgd, averaged": [
        VERSION,
        (lambda s: s.pop("factors"), "state is not one of powersgd: it lacks factors"),
        (lambda s: s.pop("rounds"), "state is not one of powersgd: it lacks rounds"),
        (
            lambda s: s.update(algorithm="topk"),
            "state was saved by topk, and this training uses powersgd",
        ),
        (
            lambda s: s["factors"].pop("0.weight"),
            r"factors of another model: it lacks \['0.weight'\]",
        ),
        (
            lambda s: s["memories"].update({"0.weight": torch.zeros(2)}),
            r"memories that are not .* is \(2,\) torch.float32",
        ),
    ],
    "low_precision_decentralized": [
        (
            lambda s: s.update(ring=(s["ring"][0] + 1, 9)),
            r"=\(\d, 9\) of a ring, this is \(\d, 2\)",
        ),
        (lambda s: s["replicas"].popitem(), r"it lacks \['0.weight: right neighbour'\]"),
        (
            lambda s: s.update(replicas={name: t[:1] for name, t in s["replicas"].items()}),
            r"'2.bias: own' is \(1,\) torch.float32 there and \(3,\)",
        ),
        (
            lambda s: s.update(replicas={name: t.half() for name, t in s["replicas"].items()}),
            r"is \(3,\) torch.float16 there",
        ),
    ],
    "decentralized": [
        (lambda s: s.pop("averagings"), "state is not one of decentralized: it lacks averagings")
    ],
    "bytegrad with memory": [
        VERSION,
        (
            lambda s: s["memories"][0].pop("chunks"),
            r"\['memories'\]\[0\] must have the key 'chunks'",
        ),
        (
            lambda s: s.update(algorithm="qadam"),
            "state was saved by qadam, and this training uses bytegrad",
        ),
        (
            lambda s: s["memories"].pop(),
            r"memories of another model: it lacks \['0.bias \(8,\)'",
        ),
        (
            lambda s: s["memories"][0]["tensors"].append("3.bias (3,)"),
            r"memories of another model: it lacks none, and \['3.bias \(3,\)'\] are new",
        ),
        (
            lambda s: s["memories"][0].update(worker=torch.zeros(3)),
            r"'worker' is \(3,\) torch.float32 there and",
        ),
        (
            lambda s: s["memories"][0].update(server=torch.zeros(42, dtype=torch.float64)),
            r"'server' is \(42,\) torch.float64 there and \(42,\) torch.float32 here",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, *row) for name, rows in UNFIT.items() for row in rows],
    ids=lambda value: "" if callable(value) else value[:40],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    name: str, change: Any, message: str
) -> None:
    def rank(r: int) -> None:
        run = Run(name, network())
        run.step(*range(3))
        before = run.algorithm.state_dict()
        state = copy.deepcopy(before)
        change(state)
        with pytest.raises(ValueError, match=message):
            run.algorithm.load_state_dict({**state, "train_step_counter": 99})
        assert_same(run.algorithm.state_dict(), before)
        assert run.module.bagua_train_step_counter == 3

    simulate(1 if name == STREAMING else 2, rank)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.takes((1,))])
@on_every_rank(1)
def test_a_state_with_something_else_in_any_place_is_refused_and_changes_nothing(
    r: int, name: str
) -> None:
    run = Run(name, network())
    run.step(*range(5))
    state, before = run.algorithm.state_dict(), copy.deepcopy(run.algorithm.state_dict())
    for key in state.keys() - {"rank", "world_size"}:  # which only memories depend on
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            run.algorithm.load_state_dict({**state, key: object()})
        assert_same(run.algorithm.state_dict(), before)


def test_implementations_show_their_options() -> None:
    implementation = GradientAllReduceAlgorithm(average=False).reify(None)  # type: ignore[arg-type]
    options = "GradientAllReduceAlgorithm(hierarchical=False, average=False)"
    assert repr(implementation) == f"<GradientAllReduceAlgorithmImpl of {options}>"
