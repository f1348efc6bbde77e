"""Tests of golden vectors: the committed files equal a fresh export, wrong outputs are detected,
and the C client passes.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tests import oracle_c
from tests.oracle_c import OPERATIONS, VECTORS

from bagua_ref.algorithms.fragments import Fragment, FragmentSchedule, split_into_fragments
from bagua_ref.algorithms.q_adam import QAdamOptimizer
from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.base import COMPRESSIBLE, FLOATS
from bagua_ref.base.not_provided import install_command
from bagua_ref.cli import main
from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.comm_ops.top_k import count_of, largest
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.targets.reference_target import ReferenceTarget
from bagua_ref.conformance.targets.world import RankWorld, run_world
from bagua_ref.conformance.vectors import (
    VECTORS_VERSION,
    VectorsError,
    answers,
    check_outputs,
    export_vectors,
    read_manifest,
)
from bagua_ref.conformance.vectors.case import Numbers, canonical
from bagua_ref.conformance.vectors.files import (
    manifest_text,
    read_vectors,
    schema_text,
    tolerance_named,
)
from bagua_ref.formulas.graphs import MODES
from bagua_ref.record.tensor_files import (
    CODES,
    DamagedFileError,
    name_of,
    read_safetensors,
    write_safetensors,
)
from bagua_ref.types import ReduceOp

SUITES = (
    "codec",
    "comm_ops",
    "kernels",
    "peers",
    "qadam",
    "samplers",
    "graphs",
    "local_updates",
    "codecs",
    "compressed_gradients",
    "collectives",
    "algorithms",
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return read_manifest(VECTORS)


@pytest.fixture(scope="module")
def tensors(manifest: dict[str, Any]) -> dict[str, Tensors]:
    return read_vectors(VECTORS, manifest)


def of_one_dtype(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each case in one of its dtypes, which take turns."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        alike.setdefault(case["id"].replace(f"/{case['dtype']}/", "/"), []).append(case)
    return [of_dtypes[place % len(of_dtypes)] for place, of_dtypes in enumerate(alike.values())]


def wrong_answers(
    suite: str,
    manifest: dict[str, Any],
    tensors: dict[str, Tensors],
    solve: Callable[..., Tensors] | None = None,
    choose: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> Iterator[str]:
    """Yield a message for each output of a suite that the second implementation, or ``solve``,
    gives otherwise.
    """
    inputs, expected = (
        tensors[f"{suite}.inputs.safetensors"],
        tensors[f"{suite}.expected.safetensors"],
    )
    for case in choose([case for case in manifest["cases"] if case["suite"] == suite]):
        given = {entry["name"]: inputs[entry["tensor"]] for entry in case["inputs"]}
        wanted = {entry["name"]: expected[entry["tensor"]] for entry in case["outputs"]}
        if solve is None:
            found = answers.answer(
                suite, case["operation"], case["dtype"], case["parameters"], given
            )
        else:
            found = solve(case["operation"], given, wanted, **case["parameters"])
        for output in (
            case["outputs"] if solve is None else [o for o in case["outputs"] if o["name"] in found]
        ):
            magnitude, tolerance = (
                inputs.get(output.get("magnitude")),
                tolerance_named(case["tolerance"]),
            )
            try:
                assert_equal(
                    found[output["name"]],
                    expected[output["tensor"]],
                    tolerance,
                    magnitude=magnitude,
                )
            except AssertionError as error:
                yield f"{output['tensor']}: {error}"


# Committed files


@pytest.mark.proof
def test_a_fresh_export_is_what_is_committed(tmp_path: Path) -> None:
    count, names = (
        export_vectors(tmp_path / "fresh"),
        sorted(path.name for path in VECTORS.iterdir()),
    )
    assert names == sorted(path.name for path in (tmp_path / "fresh").iterdir())
    changed = [
        name
        for name in names
        if (VECTORS / name).read_bytes() != (tmp_path / "fresh" / name).read_bytes()
    ]
    assert not changed, (
        "once released, vectors must not change: what gives other results is a new version"
    )
    assert count == len(read_manifest(VECTORS)["cases"])


def test_they_are_small_and_complete(manifest: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) <= 6 * 2**20
    files = {f"{suite}.{kind}.safetensors" for suite in SUITES for kind in ("inputs", "expected")}
    assert {path.name for path in VECTORS.iterdir()} == {
        *files,
        "manifest.json",
        "manifest.schema.json",
    }
    assert {entry["name"] for entry in manifest["files"]} == files
    assert {flag for case in manifest["cases"] for flag in case["flags"]} == {
        "valid",
        "edge",
        "poison",
    }
    assert {case["tolerance"].partition("(")[0] for case in manifest["cases"]} == {
        "EXACT",
        "ULP",
        "SUM",
    }
    operations = {
        name_of(dtype): {c["operation"] for c in manifest["cases"] if c["dtype"] == name_of(dtype)}
        for dtype in FLOATS
    }
    in_all = set.intersection(*operations.values())
    assert {
        "add",
        "subtract",
        "add_scaled",
        "average",
        "divide",
        "combine_ring",
        "async_average",
    } <= in_all
    assert {
        "update_momentum",
        "reduce_chunks",
        "gather_flat",
        "scatter_flat",
        "order_by_complexity",
    } <= in_all
    assert {"centralized_scatter_gather", "decentralized_shift_one", "decentralized_all"} <= in_all
    compressible = set.intersection(*(operations[name_of(dtype)] for dtype in COMPRESSIBLE))
    assert {
        *OPERATIONS[:3],
        "centralized_low_precision",
        "low_precision_decentralized",
        "qadam_momentum",
    } <= compressible
    worlds = [
        case["parameters"]["nodes"] for case in manifest["cases"] if case["suite"] == "comm_ops"
    ]
    assert {sum(nodes) for nodes in worlds} >= {1, 2, 3, 4, 5, 6, 8}
    assert any(len(set(nodes)) > 1 for nodes in worlds)


def test_the_schema_is_one_and_is_committed() -> None:
    Draft202012Validator.check_schema(json.loads(schema_text()))
    assert (VECTORS / "manifest.schema.json").read_text("utf-8") == schema_text()


def test_the_page_lists_every_operation(manifest: dict[str, Any]) -> None:
    page = (oracle_c.ROOT / "docs" / "reference" / "vectors.md").read_text()
    named = {
        name for case in manifest["cases"] for name in (case["operation"], *case["parameters"])
    }
    assert [name for name in named if f"`{name}`" not in page] == []


@pytest.mark.parametrize("suite", SUITES)
def test_the_files_alone_are_enough_to_compute_every_case(
    suite: str, manifest: dict[str, Any], tensors: Any
) -> None:
    # a fresh export computes all
    assert list(wrong_answers(suite, manifest, tensors, choose=of_one_dtype)) == []


@pytest.mark.parametrize("suite", SUITES)
def test_the_safetensors_library_reads_the_same(suite: str, tensors: Any) -> None:
    for kind in ("inputs", "expected"):
        found, ours = (
            load_file(VECTORS / f"{suite}.{kind}.safetensors"),
            tensors[f"{suite}.{kind}.safetensors"],
        )
        assert found.keys() == ours.keys()
        for key, x in found.items():
            assert_equal(ours[key], x, EXACT)


def test_no_nan_has_bits_of_its_own(tensors: Any) -> None:
    for file in tensors.values():
        for name, x in file.items():
            if x.dtype.is_floating_point and x.numel():
                assert torch.equal(
                    x.reshape(-1).view(torch.uint8), canonical(x).reshape(-1).view(torch.uint8)
                ), name


def test_numbers_are_those_of_version_1() -> None:
    numbers = Numbers(7)
    drawn = [numbers.of(kind, 2, torch.float32) for kind in ("plain", "wide", "halves")]
    pinned = [[-1078696657, -1070414874], [840601233, 974321922], [-1014710272, 1083179008]]
    assert [x.view(torch.int32).tolist() for x in drawn] == pinned


# The package


TARGET, KERNELS = ReferenceTarget(), get_backend("reference")


def on_ranks(nodes: list[int], program: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    return torch.stack(run_world(lambda world: world, tuple(nodes), program))


def kernel(name: str, x: Tensors, y: Tensors, **parameters: Any) -> Tensors:
    first, *others = (value.clone() for value in x.values())
    getattr(KERNELS, f"{name}_")(first, *others, **parameters)
    return {"x": first}


def flat_kernel(name: str, x: Tensors, y: Tensors, **parameters: Any) -> Tensors:
    if name == "order_by_complexity":
        return {"order": KERNELS.order_by_complexity(x["keys"])}
    found = {key: torch.empty_like(value) for key, value in y.items()}
    if name == "gather_flat":
        KERNELS.gather_flat(list(x.values()), found["flat"])
    else:
        KERNELS.scatter_flat(x["flat"], list(found.values()))
    return found


def coded(
    name: str,
    x: Tensors,
    y: Tensors,
    num_chunks: int,
    target_chunk: int | None = None,
    num_elements: int = 0,
    codec: str = "MinMaxUInt8",
) -> Tensors:
    found, outputs = get_codec(codec, "reference"), Tensors()
    if "x" in x:
        before = None if target_chunk is None else x["payload"].clone()
        outputs["payload"] = found.compress(x["x"], num_chunks, target_chunk, before)
    if "x" in y:
        outputs["x"] = torch.empty_like(y["x"])
        found.decompress((x | outputs)["payload"], num_chunks, outputs["x"])
    return outputs


def centralized(
    name: str,
    x: Tensors,
    y: Tensors,
    nodes: list[int],
    hierarchical: bool,
    average: bool = True,
    beta1: float = 0.0,
) -> Tensors:
    given = x["m"].repeat(sum(nodes), 1) if name == "qadam_momentum" else x["x"]
    for momentum, gradient in zip(given, x.get("grad", ())):  # noqa: B905 - only qadam has gradients
        KERNELS.update_momentum_(momentum, gradient, beta1)
    options = {
        "average": average,
        "hierarchical": hierarchical,
        "scattergather": name != "centralized_full_precision",
    }
    options["compression"] = (
        "MinMaxUInt8" if name in ("centralized_low_precision", "qadam_momentum") else None
    )
    (output,) = y
    return {
        output: on_ranks(
            nodes, lambda world: TARGET.comm_ops.centralized(world, given[world.rank], **options)
        )
    }


def before_rounds(x: Tensors, y: Tensors) -> torch.Tensor:
    """Return every rank's weights before each round: those expected of the last round, and the
    update.
    """
    before = torch.cat([x["x"][None], y["x"][:-1]])
    KERNELS.add_(before.view(-1), x["updates"].view(-1))
    return before


def decentralized(
    name: str,
    x: Tensors,
    y: Tensors,
    nodes: list[int],
    hierarchical: bool,
    graph: Any = "shift_one",
) -> Tensors:
    graph, before = (
        ("all", x["x"][None]) if name == "decentralized_all" else (graph, before_rounds(x, y))
    )

    def program(world: RankWorld) -> torch.Tensor:
        rounds = list(before[:, world.rank])
        return torch.stack(
            TARGET.comm_ops.decentralized_on_graph(
                world, rounds, graph=graph, hierarchical=hierarchical
            )
        )

    found = on_ranks(nodes, program).transpose(0, 1)
    return {"x": found[0] if name == "decentralized_all" else found}


def on_ring(name: str, x: Tensors, y: Tensors, nodes: list[int], hierarchical: bool) -> Tensors:
    """Run a round more than the case has: its result must be that of new operations with the
    expected replicas.
    """
    before, last = before_rounds(x, y), y["x"][-1]
    leaders = (
        [sum(nodes[:node]) for node in range(len(nodes))]
        if hierarchical
        else list(range(sum(nodes)))
    )
    replicas = {
        leader: [y[name][i] for name in ("weight", "left", "right")]
        for i, leader in enumerate(leaders)
    }

    def rounds(start: Callable[[int], Any], before: torch.Tensor) -> torch.Tensor:
        def program(world: RankWorld) -> torch.Tensor:
            given = [start(world.rank), *before[:, world.rank], last[world.rank]]
            return torch.stack(
                TARGET.comm_ops.low_precision_decentralized(world, given, hierarchical=hierarchical)
            )

        return on_ranks(nodes, program).transpose(0, 1)

    found = rounds(lambda rank: x["x"][rank], before)
    assert_equal(
        found[-1], rounds(lambda rank: replicas.get(rank, [last[rank]] * 3), before[:0])[0], EXACT
    )
    return {"x": found[:-1]}


def collective(name: str, x: Tensors, y: Tensors, nranks: int = 0, **parameters: Any) -> Tensors:
    """Call the communicator on every rank, in place if the collective leaves other ranks' tensors
    as they are.
    """
    arguments = [
        ReduceOp[parameters[key]] if key == "op" else parameters[key]
        for key in ("root", "op")
        if key in parameters
    ]
    given = x["x"].expand(nranks or len(x["x"]), -1)

    def program(world: RankWorld) -> Any:
        comm: Any = world.transport
        mine = {key: value[world.rank].clone() for key, value in (x | {"x": given}).items()}
        if name == "alltoall_v":
            sent, received = (
                [mine[f"{way}_{of}"].tolist() for of in ("counts", "displs")]
                for way in ("send", "recv")
            )
            comm.alltoall_v(mine["x"], *sent, mine["before"], *received)
            return mine["before"]
        if name in ("broadcast", "allreduce", "reduce"):
            getattr(comm, name if name == "broadcast" else f"{name}_inplace")(mine["x"], *arguments)
            return mine["x"]
        out = torch.empty(y["out"].shape[-1], dtype=y["out"].dtype)
        getattr(comm, name)(mine["x"], out, *arguments)
        return out

    found = on_ranks([len(given)], program)
    return {"out": found[parameters["root"]] if name == "gather" else found}


def training(
    name: str, x: Tensors, y: Tensors, nodes: list[int], sizes: list[int], **options: Any
) -> Tensors:
    """Train on the given gradients; of what is a program of actions, look after each step."""
    looks = {"local_sgd": [], "diloco": [("global weights",)]}.get(name)
    if name == "diloco":
        outer = {key: options.pop(f"outer_{key}") for key in ("lr", "momentum", "nesterov")}
        options["outer_optimizer"] = {"class": "SGD", **outer}

    def program(world: RankWorld) -> torch.Tensor:
        steps: list[Any] = [
            dict(enumerate(step[world.rank].split(sizes))) for step in x["gradients"]
        ]
        if looks is not None:
            steps = [action for gradients in steps for action in (("step", gradients), *looks)]
        train = getattr(TARGET.algorithms, name)
        seen = train(
            world,
            list(x["x"].split(sizes)),
            steps,
            bucket_bytes=10 * 2**20,
            **copy.deepcopy(options),
        )
        return torch.stack([torch.cat(values) for values in seen])

    seen = on_ranks(nodes, program).transpose(0, 1)
    return {output: seen[place :: 1 + len(looks or [])] for place, output in enumerate(y)}


def topk(name: str, x: Tensors, y: Tensors, **options: Any) -> Tensors:
    def program(world: RankWorld) -> torch.Tensor:
        steps = [
            action
            for g in x["gradients"][:, world.rank]
            for action in (("step", {0: g}), ("memories",))
        ]
        weights, fixed = (
            [torch.zeros_like(x["gradients"][0, 0])],
            {"lr": 0.5, "bucket_bytes": 10 * 2**20, "warmup_steps": 0},
        )
        found = [
            after[0] for after in TARGET.algorithms.topk(world, weights, steps, **fixed, **options)
        ]
        return torch.stack(
            [torch.zeros(weights[0].shape) if e is None else e.float() for e in found]
        )

    seen = on_ranks([1] * x["gradients"].shape[1], program)
    found = {"x": seen[0, ::2].to(y["x"].dtype), "errors": seen[:, 1::2].transpose(0, 1)}
    return {output: found[output] for output in y}


def with_memory(
    name: str, x: Tensors, y: Tensors, nodes: list[int], codec: str, **options: Any
) -> Tensors:
    def program(world: RankWorld) -> torch.Tensor:
        steps = [("step", {0: g}) for g in x["gradients"][:, world.rank]]
        weights, fixed = (
            [torch.zeros_like(x["gradients"][0, 0])],
            {"lr": 0.5, "bucket_bytes": 10 * 2**20, "compression": codec},
        )
        return torch.stack(
            [
                after[0]
                for after in TARGET.algorithms.bytegrad_with_memory(
                    world, weights, steps, **fixed, **options
                )
            ]
        )

    return {"x": on_ranks(nodes, program)[0]}


def drawn(
    name: str,
    x: Tensors,
    y: Tensors,
    N: int,
    num_replicas: int,
    epoch: int,
    max_cost: int = 0,
    drop_last_batch: bool = False,
    history: Sequence[list[int]] = (),
    **options: Any,
) -> Tensors:
    samplers, costs = TARGET.samplers, x["costs"] if "costs" in x else x["complexities"]
    cut = partial(samplers_plain.filled_batches, costs.tolist(), max_cost)
    if "padded" in options:
        options["padded"] = samplers_plain.FORMULAS.get(options["padded"], options["padded"])

    def start(replicas: int, rank: int) -> Any:
        if name == "budget_batches":
            made = samplers.BudgetBatchSampler(
                costs, max_cost, num_replicas=replicas, rank=rank, **options
            )
            made.set_epoch(epoch)
            return made
        made = samplers.LoadBalancingDistributedSampler(
            range(N), None, replicas, rank, complexities=costs, backend="reference", **options
        )
        made.set_epoch(epoch)
        return (
            samplers.LoadBalancingDistributedBatchSampler(made, cut, drop_last_batch)
            if max_cost
            else made
        )

    unit, state, stretches = "batches" if max_cost else "samples", None, []
    for replicas, taken in [*history, (num_replicas, 0)]:
        started = [start(replicas, rank) for rank in range(replicas)]
        for sampler in started if state is not None else ():
            sampler.load_state_dict(state)
        stretches.append([list(sampler) for sampler in started])
        state = started[0].state_dict(**{unit: taken})
    items = [item for own in stretches for drawn_by_one in own for item in drawn_by_one]
    found = {"counts": [len(own[0]) for own in stretches], "indices": items}
    if max_cost:
        found |= {
            "sizes": [len(batch) for batch in items],
            "indices": [index for batch in items for index in batch],
        }
    return {
        output: torch.tensor(found[output], dtype=torch.int64).view(y[output].shape) for output in y
    }


def queries(x: Tensors) -> list[tuple[int, int]]:
    return list(zip(x["rank"].tolist(), x["step"].tolist(), strict=True))


def frozen_step(x: Tensors, s: int, lr: float, beta1: float, beta2: float, eps: float) -> Tensors:
    p = torch.nn.Parameter(x["p"].clone())
    optimizer = QAdamOptimizer([p], lr=lr, betas=(beta1, beta2), eps=eps)
    optimizer.param_groups[0]["warmup_steps"] = optimizer.step_id = s - 1
    state = optimizer.ensure_state(p)
    state["exp_avg"].copy_(x["m"])
    state["exp_avg_sq"].copy_(x["v"])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return {"p": p.detach()}


def fragments_due(
    x: Tensors, period: int, fragments: int, delay: int, warmup_steps: int
) -> Tensors:
    schedule, steps = (
        FragmentSchedule(period, fragments, delay),
        (x["step"] - warmup_steps).tolist(),
    )
    after = {"sent": schedule.sent_after, "applied": schedule.applied_after}
    due = {name: [of(t) if t > 0 else None for t in steps] for name, of in after.items()}
    return {
        name: torch.tensor([-1 if p is None else p for p in found]) for name, found in due.items()
    }


def mixed(x: Tensors, mix: float) -> Tensors:
    weights = torch.nn.Parameter(x["x"].clone())
    fragment = Fragment(["x"], [weights], lambda tensors: torch.optim.SGD(tensors, lr=1.0))
    with torch.no_grad():
        fragment.copies[0].copy_(x["g"])
    fragment.mix(mix)
    return {"x": weights.detach()}


PARTS: dict[str, Callable[..., Tensors]] = {
    "shift_one_peer": lambda x, nranks: {
        "peer": torch.tensor([shift_one_peer(r, nranks, t) for r, t in queries(x)])
    },
    "graph_sources": lambda x, graph, nranks: {
        "sources": torch.tensor(
            [sorted(s for s, _ in MODES[graph].graph(t, nranks)[r]) for r, t in queries(x)]
        )
    },
    "qadam_step": frozen_step,
    "qadam_frozen_step": frozen_step,
    "fragment_of_parameter": lambda x, fragments: {
        "fragment": torch.tensor(split_into_fragments(x["bytes"].tolist(), fragments))
    },
    "diloco_schedule": fragments_due,
    "mix": mixed,
    "topk_count": lambda x, ratio: {
        "k": torch.tensor([count_of(m, ratio) for m in x["m"].tolist()])
    },
    "topk_indices": lambda x, k: {"indices": largest(x["p"], k)},
}
"""Functions of the package that are no part of a target."""

RUNS: dict[str, Callable[..., Tensors]] = {
    "kernels": kernel,
    **dict.fromkeys(
        ("kernels/gather_flat", "kernels/scatter_flat", "kernels/order_by_complexity"), flat_kernel
    ),
    **dict.fromkeys(("codec", "codecs"), coded),
    "comm_ops": centralized,
    **dict.fromkeys(
        ("comm_ops/decentralized_all", "comm_ops/decentralized_shift_one", "graphs"), decentralized
    ),
    "comm_ops/low_precision_decentralized": on_ring,
    "collectives": collective,
    **dict.fromkeys(("algorithms", "local_updates/local_sgd", "local_updates/diloco"), training),
    "compressed_gradients/topk": topk,
    "compressed_gradients/error_feedback": with_memory,
    "samplers": drawn,
}
"""Operations of a target, by suite, and those that differ from the suite's others."""

ONLY_IN_SUITES = {
    "comm_ops": {"async_average"},
    "local_updates": {"local_sgd_schedule"},
    "compressed_gradients": {"powersgd_rank", "orthonormalize", "powersgd_round"},
}
"""Parts of algorithms for which the package has no function of its own; conformance suites compare
whole trainings.
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "choose", [of_one_dtype, pytest.param(list, marks=pytest.mark.proof)], ids=["one_dtype", "all"]
)
@pytest.mark.parametrize("suite", SUITES)
def test_the_package_gives_the_expected_values(
    suite: str, choose: Any, manifest: dict[str, Any], tensors: Any
) -> None:
    unanswered = set()

    def solve(name: str, x: Tensors, y: Tensors, **parameters: Any) -> Tensors:
        if name in PARTS:
            return PARTS[name](x, **parameters)
        run = RUNS.get(f"{suite}/{name}") or RUNS.get(suite)
        if run is None or name in ONLY_IN_SUITES.get(suite, ()):
            unanswered.add(name)
            return {}
        return run(name, x, y, **parameters)

    assert list(wrong_answers(suite, manifest, tensors, solve, choose)) == []
    assert unanswered == ONLY_IN_SUITES.get(suite, set())


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"abcd", 0xDE0327B0D25D92CC),
        (b"message digest", 0x066ED728FCEEB3BE),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
        (b"1234567890" * 8, 0xE04A477F19EE145D),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, bytes) else "",
)
def test_S8_1_the_hash_is_xxh64_with_seed_0(key: bytes, digest: int) -> None:
    """Published test vectors for every length that the algorithm treats separately."""
    assert xxhash.xxh64_intdigest(key) == digest


# Verdicts

CASE = "kernels/add/float32/plain:x"
CODEC = "codec/compress_minmax_uint8/float32/edges-nan-first:payload"
MEAN = "comm_ops/centralized_full_precision/float32/3-flat-any-order-mean:x"
SPECIAL, ZEROS = "kernels/add/float32/special:x", "kernels/add/float32/zeros:x"


@pytest.fixture(scope="module")
def some(manifest: dict[str, Any], tensors: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few vectors of each operation and dtype, which are checked quickly."""
    folder = tmp_path_factory.mktemp("some")
    wanted = {name.partition(":")[0] for name in (CASE, CODEC, MEAN, SPECIAL, ZEROS)}
    first = {
        (case["suite"], case["operation"], case["dtype"]): case["id"]
        for case in reversed(manifest["cases"])
    }.values()
    chosen = [case for case in manifest["cases"] if case["id"] in {*wanted, *first}]
    files = {}
    for suite in SUITES:
        entries = [case for case in chosen if case["suite"] == suite]
        names = {
            kind: {entry["tensor"] for case in entries for entry in case[kind]}
            for kind in ("inputs", "outputs")
        }
        names["inputs"] |= {
            output["magnitude"]
            for case in entries
            for output in case["outputs"]
            if "magnitude" in output
        }
        for kind, file in (
            ("inputs", f"{suite}.inputs.safetensors"),
            ("outputs", f"{suite}.expected.safetensors"),
        ):
            files[file] = write_safetensors(
                folder / file, {name: tensors[file][name] for name in names[kind]}
            )
    (folder / "manifest.json").write_text(manifest_text(chosen, files))
    return folder


@pytest.fixture
def outputs(tmp_path: Path, some: Path) -> Path:
    """Return a folder of correct outputs for some cases."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    for path in some.glob("*.expected.safetensors"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def check(
    capsys: pytest.CaptureFixture[str], some: Path, outputs: Path
) -> Callable[..., tuple[int, str]]:
    """Return a function that checks outputs against vectors and returns the exit code and the
    printed text.
    """

    def run(*more: str, outputs: Path = outputs, vectors: Path = some) -> tuple[int, str]:
        try:
            code = main(["vectors", "check", str(vectors), "--outputs", str(outputs), *more])
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def change(outputs: Path, suite: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit one file of outputs with the safetensors package."""
    path = outputs / f"{suite}.expected.safetensors"
    found = load_file(path)
    edit(found)
    save_file(
        {name: x.clone(memory_format=torch.contiguous_format) for name, x in found.items()}, path
    )


def cut_off(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_right_outputs_pass(check: Any, some: Path) -> None:
    code, printed = check()
    assert code == 0, printed
    assert (
        f"PASSED: {len(read_manifest(some)['cases'])} passed, 0 failed, 0 missing, 0 problems"
        in printed
    )
    assert "specification 1.1" in printed


@pytest.mark.parametrize(
    ("suite", "edit", "message"),
    [
        (
            "kernels",
            lambda t: t[CASE].view(torch.int32)[3].add_(1),
            "1 of 33 elements differ (tolerance EXACT); first at (3,)",
        ),
        (
            "kernels",
            lambda t: t.pop(CASE),
            "S1 kernels/add/float32/plain [valid]: missing: no output x",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].double()}),
            "x: wrong dtype: float64 instead of float32",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].view(3, 11)}),
            "x: wrong shape: [3, 11] instead of [33]",
        ),
        (
            "kernels",
            lambda t: t.update({CASE: t[CASE].fill_(torch.nan)}),
            "33 of 33 elements differ",
        ),
        (
            "kernels",
            lambda t: t.update(mine=t[CASE]),
            "kernels.expected.safetensors: mine: extra: no case has such an output",
        ),
        (
            "kernels",
            lambda t: t.update({CASE + "x": t.pop(CASE)}),
            "extra: no case has such an output",
        ),
        (
            "peers",
            lambda t: t.update({CASE: torch.zeros(33)}),
            f"{CASE}: given twice: it is also in kernels.expected",
        ),
        (
            "codec",
            lambda t: t[CODEC][2].fill_(0xC1),
            "S4.4 codec/compress_minmax_uint8/float32/edges-nan-first [poison]: payload",
        ),
        # the padding after the levels
        ("codec", lambda t: t[CODEC][63].fill_(1), "1 of 64 elements differ"),
    ],
    ids=[
        "value",
        "missing",
        "dtype",
        "shape",
        "nan",
        "extra",
        "renamed",
        "twice",
        "nan bits of a header",
        "padding",
    ],
)
def test_a_wrong_output_fails(
    check: Any, outputs: Path, suite: str, edit: Any, message: str
) -> None:
    change(outputs, suite, edit)
    code, printed = check()
    assert code == 1
    assert message in printed
    assert "FAILED" in printed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda o: cut_off(o / "codec.expected.safetensors", 1),
            "codec.expected.safetensors: not a complete safetensors file",
        ),
        (
            lambda o: (o / "notes.txt").write_text("hello"),
            "notes.txt: foreign: only *.safetensors files",
        ),
        (
            lambda o: (o / "more.safetensors").mkdir(),
            "more.safetensors: foreign: only *.safetensors files",
        ),
        (
            lambda o: torch.save(torch.zeros(3), o / "peers.expected.safetensors"),
            "peers.expected.safetensors: not a complete",
        ),
        (lambda o: [path.unlink() for path in o.iterdir()], "FAILED: 0 passed, 0 failed,"),
    ],
    ids=["truncated", "foreign", "folder", "pickle", "nothing"],
)
def test_a_file_that_has_no_place_fails(
    check: Any, outputs: Path, damage: Any, message: str
) -> None:
    damage(outputs)
    code, printed = check()
    assert code == 1
    assert message in printed


def test_json_has_every_case(check: Any, outputs: Path, some: Path) -> None:
    change(outputs, "kernels", lambda t: t.pop(CASE))
    report = some.parent / "report.json"
    code, printed = check("--json", "--json-file", str(report))
    found = json.loads(printed)
    assert json.loads(report.read_text()) == found
    assert (code, found["passed"]) == (1, False)
    count = len(read_manifest(some)["cases"])
    assert found["counts"] == {"passed": count - 1, "failed": 0, "missing": 1}
    assert len(found["cases"]) == count
    (wrong,) = [case for case in found["cases"] if case["status"] != "passed"]
    assert (wrong["id"], wrong["clause"], wrong["message"]) == (
        "kernels/add/float32/plain",
        "S1",
        "missing: no output x",
    )


def test_a_selection_asks_for_its_cases_only(check: Any, outputs: Path) -> None:
    change(outputs, "kernels", lambda t: t[CASE].zero_())
    assert check()[0] == 1
    code, printed = check("--operation", "shift_one_peer", "average")
    assert code == 0
    assert "not selected" in printed
    assert check("--dtype", "float16")[0] == 0
    assert check("--operation", "add", "--dtype", "float32")[0] == 1


@pytest.fixture
def vectors(tmp_path: Path, some: Path) -> Path:
    """Return a copy of some vectors that a test may damage."""
    return Path(shutil.copytree(some, tmp_path / "vectors"))


def flip(vectors: Path) -> None:
    path = vectors / "codec.inputs.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(vectors: Path) -> None:
        path = vectors / "manifest.json"
        found = json.loads(path.read_text())
        edit(found)
        path.write_text(json.dumps(found))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is not what was exported: its sha256 is"),
        (
            lambda v: (v / "peers.expected.safetensors").unlink(),
            "peers.expected.safetensors' cannot be read",
        ),
        (lambda v: (v / "manifest.json").unlink(), "is this a directory of vectors?"),
        (lambda v: (v / "manifest.json").write_text("{"), "is not valid JSON"),
        (lambda v: (v / "manifest.json").write_text("[]"), "does not match the schema at the top"),
        (
            edit_manifest(lambda m: m.update(vectors_version="3")),
            "has vectors_version '3'; this bagua_ref checks '2'",
        ),
        (
            edit_manifest(lambda m: m["cases"][0].update(tolerance="5 %")),
            "does not match the schema at cases/0/tolerance",
        ),
        (
            edit_manifest(lambda m: m["cases"][0]["outputs"][0].update(shape=[7])),
            "as the manifest describes it",
        ),
        (edit_manifest(lambda m: m["cases"].append(m["cases"][0])), "has a case twice"),
        (edit_manifest(lambda m: m["files"].pop()), "as the manifest describes it"),
        (
            edit_manifest(lambda m: m["files"][0].update(name="../x.inputs.safetensors")),
            "does not match the schema",
        ),
    ],
)
def test_damaged_vectors_cannot_be_used(
    check: Any, vectors: Path, damage: Any, message: str
) -> None:
    damage(vectors)
    code, printed = check(vectors=vectors)
    assert code == 2
    assert message in printed


def test_what_cannot_be_checked_is_said(check: Any, outputs: Path) -> None:
    assert check(outputs=outputs / "nowhere")[0] == 2
    code, printed = check("--operation", "adds")
    assert (code, "operation 'adds' has no case; known are add, " in printed) == (2, True)
    assert check("--operation", "shift_one_peer", "--dtype", "float16")[0] == 2


def test_without_jsonschema_wrong_arguments_are_named_first(
    check: Any,
    outputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    hint = f"golden vectors need jsonschema; install with: {install_command('conformance')}"
    code, printed = check()
    assert (code, hint in printed) == (2, True)
    for folders in ({"outputs": tmp_path / "nowhere"}, {"vectors": tmp_path / "nowhere"}):
        code, printed = check(**folders)
        assert (code, hint in printed, "no such folder" in printed) == (2, False, True)
    assert main(["vectors", "export", str(outputs)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["vectors", "export", str(tmp_path / "new")]) == 2
    assert hint in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []


def test_export_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bagua_ref.conformance.vectors.files._write", lambda directory: 7)
    monkeypatch.setattr("bagua_ref.conformance.vectors.files.read_manifest", lambda directory: {})
    assert main(["vectors", "export", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path),
        "vectors_version": VECTORS_VERSION,
        "cases": 7,
    }


def test_export_leaves_other_files_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["vectors", "export", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert main(["vectors", "export", str(tmp_path / "mine")]) == 2


# Tolerances


def moved(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return positive numbers moved by the given number of steps between neighbouring floats."""
    return (x.view(torch.int32 if x.dtype is torch.float32 else torch.int64) + steps).view(x.dtype)


@pytest.mark.parametrize(("steps", "code"), [(4, 0), (-4, 0), (5, 1), (-5, 1)])
def test_ulp(check: Any, outputs: Path, steps: int, code: int) -> None:
    change(outputs, "qadam", lambda t: t.update({name: moved(x, steps) for name, x in t.items()}))
    assert check()[0] == code


@pytest.mark.parametrize(("epsilons", "code"), [(2.5, 0), (-2.5, 0), (12, 1), (-12, 1)])
def test_sum(check: Any, outputs: Path, epsilons: float, code: int, tensors: Any) -> None:
    magnitude = tensors["comm_ops.inputs.safetensors"][f"{MEAN}.magnitude"]
    eps = torch.finfo(torch.float32).eps
    change(
        outputs,
        "comm_ops",
        lambda t: t.update({MEAN: (t[MEAN].double() + epsilons * eps * magnitude).float()}),
    )
    assert check()[0] == code


def test_the_sign_of_a_zero_counts_and_the_bits_of_a_nan_do_not(check: Any, outputs: Path) -> None:
    def other_nan(found: dict[str, torch.Tensor]) -> None:
        x = found[SPECIAL]
        assert x.isnan().any()
        found[SPECIAL] = torch.where(
            x.isnan(), torch.tensor(-1, dtype=torch.int32).view(torch.float32), x
        )

    change(outputs, "kernels", other_nan)
    assert check()[0] == 0
    change(outputs, "kernels", lambda t: t.update({ZEROS: -t[ZEROS]}))
    assert check()[0] == 1


# Files


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    written = {name_of(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in CODES}
    written |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5)}
    save_file(written, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "theirs.safetensors")
    write_safetensors(tmp_path / "ours.safetensors", written)
    for name, x in load_file(tmp_path / "ours.safetensors").items():
        assert torch.equal(x, written[name])
        assert torch.equal(found[name], written[name])
    assert found.keys() == written.keys()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = write_safetensors(path, {"a": torch.arange(3), "b": torch.zeros(2)})
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFileError, match="not a complete safetensors file"):
            read_safetensors(path)


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(100),
        file_of(b"\xff\xfe"),
        file_of([]),
        file_of(b"[" * 100_000),
        file_of({"a": 5}),
        file_of({"a": entry(dtype="F8")}, bytes(8)),
        file_of({"a": entry(dtype=None)}, bytes(8)),
        file_of({"a": entry(shape=[3])}, bytes(8)),
        file_of({"a": entry(shape=[-2])}, bytes(8)),
        file_of({"a": entry(shape=[2.0])}, bytes(8)),
        file_of({"a": entry(shape="2")}, bytes(8)),
        file_of({"a": entry(data_offsets=[8, 0])}, bytes(8)),
        file_of({"a": entry(data_offsets=[0])}, bytes(8)),
        file_of({"a": entry(data_offsets=[4, 12])}, bytes(12)),
        file_of({"a": entry(shape=[2**61, 2**61, 0], data_offsets=[0, 0])}),
        file_of({"a": entry(), "b": entry()}, bytes(8)),
        file_of({"a": entry()}, bytes(9)),
        file_of(b'{"a":1,"a":2}'),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError):
        read_safetensors(tmp_path / "x.safetensors")


# The C client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle_c.need_compiler()
    return oracle_c.build(tmp_path_factory.mktemp("oracle_c"))


@pytest.mark.proof
def test_the_client_in_c_passes(client: Path, tmp_path: Path, manifest: dict[str, Any]) -> None:
    ended = oracle_c.run(client, VECTORS, tmp_path / "outputs")
    assert ended.returncode == 0, ended.stderr
    report = check_outputs(VECTORS, tmp_path / "outputs")
    answered = {case["id"] for case in manifest["cases"] if case["operation"] in OPERATIONS}
    assert {
        verdict.case["id"] for verdict in report.verdicts if verdict.status == "passed"
    } == answered
    assert ended.stdout.startswith(f"{len(answered)} cases answered")
    assert (report.count("failed"), report.count("missing") > 0) == (0, True)
    assert not report.passed  # outputs of a part are not taken for the whole


@pytest.mark.proof
@pytest.mark.parametrize(
    "damage",
    [
        lambda v: (v / "manifest.json").unlink(),
        lambda v: (v / "manifest.json").write_text('{"vectors_version": "2", "cases": ['),
        lambda v: (v / "manifest.json").write_text("[" * 10_000),
        lambda v: (v / "manifest.json").write_text('{"vectors_version": "2'),
        lambda v: (v / "codec.inputs.safetensors").write_bytes(b"\xff" * 100),
        lambda v: cut_off(v / "codec.inputs.safetensors", 5000),
    ],
    ids=[
        "no manifest",
        "cut manifest",
        "deep manifest",
        "cut string",
        "no safetensors",
        "cut safetensors",
    ],
)
def test_the_client_in_c_says_what_it_cannot_read(
    client: Path, vectors: Path, tmp_path: Path, damage: Any
) -> None:
    damage(vectors)
    ended = oracle_c.run(client, vectors, tmp_path / "outputs")
    assert ended.returncode == 2
    assert ended.stderr


def test_an_unusable_call_raises(tmp_path: Path) -> None:
    with pytest.raises(VectorsError, match="is this a directory of vectors"):
        check_outputs(tmp_path, tmp_path)
