"""Properties of hostile input: whatever bytes arrive are read, or refused with a typed error that
says where they are from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import operator
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from unittest import mock

import jsonschema  # noqa: F401 - imported now, as its memory is not that of the input
import pytest
import safetensors.torch  # noqa: F401 - likewise
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, every_backend, inputs

import bagua_ref
from bagua_ref.backends import get_backend, get_codec
from bagua_ref.base.launch_environment import read_launch
from bagua_ref.base.untrusted import load_json
from bagua_ref.cli import main
from bagua_ref.comm_ops import CentralizedLowPrecision, LowPrecisionDecentralized
from bagua_ref.communicators.rendezvous import rendezvous
from bagua_ref.conformance.run.runner import read_xfails
from bagua_ref.errors import CommunicationError
from bagua_ref.planning import Estimate, MeasuredMachine
from bagua_ref.record.tensor_files import DamagedFileError, read_safetensors, write_safetensors
from bagua_ref.simulation import SimulatedWorld

TIMES, AND = 100, 2**20
"""Reading n bytes may take TIMES * n + AND bytes of Python's memory. Empty lists in JSON, 3 bytes
each, take 24 times as much.
"""

DEEP = "@deep@"
"""Stands for lists nested 100,000 deep, which json.dumps could not write."""

VALUES = [
    None,
    True,
    -1,
    0,
    2,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    ".",
    "../x",
    "\0",
    "\x1b[2J",
    "a\nPASSED",
    "\ud800",
    "x",
    "float32",
    "ULP(99999999999999999999)",
    DEEP,
    [],
    {},
    [[]],
    [None],
    ["x"],
    [2**63, 0],
    [-1],
    {"x": DEEP},
    [{"a": number} for number in range(50)],
]


@contextlib.contextmanager
def bounded_memory(size):
    """Fail if the block takes more of Python's memory than an input of ``size`` bytes may."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= TIMES * size + AND
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def may_refuse(kind, says, hides=None):
    """Let the block raise an error of this kind if its message says one thing and hides another."""
    try:
        yield
    except kind as error:
        if says not in str(error) or (hides is not None and hides in str(error)):
            raise AssertionError(f"says {str(error)!r}, not {says!r}") from error


def run(*command):
    """Return the exit code of ``bagua-ref`` and what it printed, which no terminal may take for a
    command.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(map(str, command)))
        except SystemExit as end:
            code = end.code
    printed = out.getvalue() + err.getvalue()
    assert printed.replace("\n", "").isprintable(), ascii(printed)
    return code, printed


def places(value, path=()):
    """Yield the path of every value inside a JSON value."""
    if path:
        yield path
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(item, (*path, key))


@st.composite
def changed_json(draw, value):
    """JSON in which one value is hostile, left out, or there twice."""
    value = json.loads(json.dumps(value))
    *above, last = draw(st.sampled_from(list(places(value))))
    inside = value
    for key in above:
        inside = inside[key]
    hostile, how = (
        draw(st.sampled_from(VALUES)),
        draw(st.sampled_from(["replaced"] * 8 + ["left out", "twice", "renamed"])),
    )
    if how == "replaced":
        inside[last] = hostile
    elif how == "twice" and isinstance(inside, dict):
        inside["@twice@"] = hostile
    elif how == "renamed" and isinstance(inside, dict):
        inside[hostile if isinstance(hostile, str) and hostile != DEEP else "x"] = inside.pop(last)
    else:
        del inside[last]
    text = json.dumps(value).replace('"@twice@"', json.dumps(last))
    return text.replace(json.dumps(DEEP), "[" * 10**5 + "]" * 10**5).encode()


@st.composite
def changed_bytes(draw, whole):
    """Bytes of which a few are others, the rest is cut off, or more follow."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
    return (
        bytes(found[: draw(st.integers(0, len(found)))])
        if draw(st.booleans())
        else bytes(found) + draw(st.binary(max_size=9))
    )


@st.composite
def changed_safetensors(draw, whole):
    """A safetensors file with a hostile header."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header = draw(changed_json(json.loads(whole[8:end])))
    length = draw(
        st.sampled_from([len(header)] * 6 + [0, len(header) + 1, 10**8, 2**63, 2**64 - 1])
    )
    return length.to_bytes(8, "little") + header + whole[end:]


@st.composite
def changed_file(draw, path):
    """The name of a file's content after a change, of a kind that fits its format."""
    whole = path.read_bytes()
    if draw(st.integers(0, 3)) == 0:
        return draw(changed_bytes(whole))
    if path.suffix == ".safetensors":
        return draw(changed_safetensors(whole))
    if path.suffix == ".json":
        return draw(changed_json(json.loads(whole)))
    first, *rest = whole.splitlines(keepends=True)
    return draw(changed_json(json.loads(first))) + b"\n" + b"".join(rest)


# Compressed payloads


@every_backend
@given(
    data=st.data(),
    dtype=st.sampled_from(COMPRESSIBLE),
    chunks=st.integers(1, 3),
    size=st.integers(0, 9),
)
def test_S4_3_any_payload_gives_numbers_or_nan_and_nothing_else_is_written(
    backend, data, dtype, chunks, size
):
    elements = chunks * size
    raw = bytearray(
        data.draw(
            st.binary(
                min_size=(n := chunks * get_codec("MinMaxUInt8").payload_bytes(size, dtype)),
                max_size=n,
            )
        )
    )
    payload, around = (
        torch.frombuffer(raw, dtype=torch.uint8),
        torch.full((elements + 2,), 7, dtype=dtype),
    )
    get_codec("MinMaxUInt8", get_backend(backend)).decompress(payload, chunks, around[1:-1])
    assert not around.isinf().any()
    assert around[0] == around[-1] == 7
    wrong = payload[: data.draw(st.integers(0, n - 1))]
    with pytest.raises(ValueError, match="payload has"):
        get_codec("MinMaxUInt8", get_backend(backend)).decompress(wrong, chunks, around[1:-1])


@given(
    seed=st.integers(0, 2**32), elements=st.integers(1, 9).map(lambda n: 3 * n), ring=st.booleans()
)
def test_S4_3_a_rank_that_sends_anything_harms_nothing_but_values(seed, elements, ring):
    codec = get_codec("MinMaxUInt8", "reference")

    def lie(x, num_chunks, target_chunk=None, out=None):
        size = num_chunks * codec.payload_bytes(len(x) // num_chunks, x.dtype)
        payload = torch.empty(size, dtype=torch.uint8) if out is None else out
        return payload.random_(generator=torch.Generator().manual_seed(seed))

    def rank(comm):
        kernels, (x, *replicas) = get_backend("reference"), torch.zeros(4, elements)
        mine = mock.Mock(wraps=codec, compress=lie) if comm.rank() == 1 else codec
        if ring:
            LowPrecisionDecentralized(comm, kernels, mine, *replicas)(x)
        else:
            CentralizedLowPrecision(comm, kernels, mine, True)(x)
        return x

    for x in SimulatedWorld(3).run(rank):
        assert x.shape == (elements,)
        assert not x.isinf().any()


# Safetensors files, golden vectors, recordings


EXAMPLE = {"a": torch.arange(4.0).reshape(2, 2), "b": torch.zeros(3, dtype=torch.uint8)}


SAMPLES = tempfile.TemporaryDirectory()


@functools.cache
def samples():
    """Return a folder of small valid files: a recording of two ranks, and golden vectors with
    outputs.
    """
    folder = Path(SAMPLES.name)
    write_safetensors(folder / "x.safetensors", EXAMPLE)
    for rank in range(2):
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with bagua_ref.record(model, sgd, folder / "run", what="values", rank=rank, world_size=2):
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
                sgd.step()
    make_vectors(folder / "vectors", folder / "outputs")
    return folder


def make_vectors(folder, outputs):
    """Write one golden case of each kind of tolerance, and what it expects as outputs."""
    golden = Path(__file__).parents[1] / "vectors" / "v2"
    manifest = json.loads((golden / "manifest.json").read_text())
    cases = list(
        {
            case["tolerance"][:3]: case for case in manifest["cases"] if len(str(case)) < 2000
        }.values()
    )
    used = {
        entry.get(key)
        for case in cases
        for entry in case["inputs"] + case["outputs"]
        for key in ("tensor", "magnitude")
    }
    files = []
    for entry in manifest["files"]:
        if tensors := {
            name: x for name, x in read_safetensors(golden / entry["name"]).items() if name in used
        }:
            for place in [folder, outputs] if "expected" in entry["name"] else [folder]:
                place.mkdir(exist_ok=True)
                written = write_safetensors(place / entry["name"], tensors)
            files.append({**entry, "sha256": hashlib.sha256(written).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files, "cases": cases}))


@contextlib.contextmanager
def changed_copy(data, folder, *names):
    """Yield a copy of a folder in which one of the files with these names has changed."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(folder, Path(temporary, folder.name))
        path = data.draw(
            st.sampled_from(sorted(path for name in names for path in copy.rglob(name))),
            label="file",
        )
        content = data.draw(changed_file(path), label="content")
        path.write_bytes(content)
        yield copy, path


@given(data=st.data())
def test_a_hostile_safetensors_file_is_read_or_refused(data):
    path = samples() / "x.safetensors"
    content = data.draw(st.binary(max_size=99) | changed_file(path))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(content)
        with bounded_memory(len(content)), contextlib.suppress(DamagedFileError):
            assert sum(x.nbytes for x in read_safetensors(path).values()) <= len(content)


@inputs(50)
@given(data=st.data())
def test_hostile_vectors_are_checked_or_refused_by_name(data):
    with (
        changed_copy(data, samples() / "vectors", "manifest.json") as (folder, path),
        bounded_memory(path.stat().st_size),
    ):
        code, printed = run("vectors", "check", folder, "--outputs", samples() / "outputs")
    assert code in (0, 1) or str(folder) in printed


@inputs(50)
@given(data=st.data())
def test_hostile_outputs_are_a_problem_of_their_file(data):
    with (
        changed_copy(data, samples() / "outputs", "*.safetensors") as (folder, path),
        bounded_memory(path.stat().st_size),
    ):
        code, printed = run("vectors", "check", samples() / "vectors", "--outputs", folder)
    assert code in (0, 1)
    assert code == 0 or "FAILED" in printed


@inputs(50)
@given(data=st.data())
def test_a_hostile_recording_is_compared_or_refused_by_name(data):
    names = ("manifest.json", "steps.jsonl", "*0.safetensors")
    with (
        changed_copy(data, samples() / "run", *names) as (folder, path),
        bounded_memory(path.stat().st_size),
    ):
        results = run("trace", "diff", folder, samples() / "run"), run("trace", "show", folder)
    assert all(code in (0, 1) or str(folder) in printed for code, printed in results)


# Other files of the command line


@given(data=st.data())
def test_hostile_costs_are_read_or_refused_by_name(data):
    one = Estimate(1e-9, 2e-9, 3e-9)
    costs = MeasuredMachine(
        (one, one), (one, one), one, {"": one, "OneBit": one}, {"topk": one}, True, "x"
    )
    content = data.draw(changed_json(costs.as_json()))
    with bounded_memory(len(content)), may_refuse(ValueError, ""):
        found = MeasuredMachine.from_json(load_json(content))
        for end in (0, 1, 2):
            with may_refuse(ValueError, "not measured"):
                machine = found.machine(operator.itemgetter(end))
                assert all(
                    0 <= number < math.inf
                    for number in (*machine.links.between, machine.compute, *machine.codec.values())
                )


@given(
    content=st.binary(max_size=99)
    | st.text(max_size=99).map(lambda text: text.encode(errors="surrogatepass"))
)
def test_a_hostile_list_of_known_failures_is_read_or_refused_by_name(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "known.txt")
        path.write_bytes(content)
        with may_refuse(ValueError, str(path)):
            assert set(read_xfails(path, ["a", "b"])) <= {"a", "b"}


# What ranks tell each other through the store, and what launchers tell them


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=9,
)
announcements = (
    st.binary(max_size=50)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.just(b"[" * 10**5)
)


@given(heard=announcements)
def test_S1_a_hostile_answer_ends_the_rendezvous_with_a_typed_error(heard):
    store = dist.HashStore()
    store.set("proposed", "m")
    store.set("m/all", heard)
    with pytest.raises(CommunicationError):
        rendezvous(store, 1, 2, "card", 0.05)
    store.set("m/answer1", heard)
    with (
        mock.patch("uuid.uuid4", return_value=mock.Mock(hex="m")),
        may_refuse(CommunicationError, "rank 1", hides="lost the store"),
    ):
        assert rendezvous(store, 0, 2, "card", 0.05)[1][0] == "card"


VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "0",
    "PMI_SIZE": "2",
    "PMIX_RANK": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "7",
    "MASTER_PORT": "1",
}
texts = st.sampled_from(
    [
        "",
        "-1",
        "2",
        "9" * 5000,
        "10000000000",
        "1(x10000000000)",
        "1(x99999999999999999999)",
        "[" * 3000,
        "a[",
        "\udc80",
        "\0",
        "1,1",
        "٢",
    ]
) | st.text(max_size=9)


@given(
    prefix=st.sampled_from(["OMPI", "PMI", "SLURM"]),
    changes=st.dictionaries(st.sampled_from(list(VARIABLES)), texts, max_size=3),
)
def test_S1_hostile_variables_of_a_launcher_are_understood_or_refused_by_name(prefix, changes):
    environment = {
        name: text for name, text in VARIABLES.items() if name.startswith((prefix, "MASTER"))
    } | changes
    # all names have an underscore
    with bounded_memory(sum(map(len, environment.values()))), may_refuse(ValueError, "_"):
        launch = read_launch(environment)
        assert launch is None or 0 <= launch.identity.rank < launch.identity.world_size
