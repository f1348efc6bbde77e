"""Tests of recorded trainings: digests, records that survive crashes, and planted faults that are
located and named.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.launch import run_script
from tests.recorded_trainings import AT, FAULTS, STEPS, Fault, Training, hidden_update, plain_sgd
from torch import Tensor, nn

import bagua_ref
from bagua_ref.cli import main
from bagua_ref.conformance.formats import _sums, _sums_on_device
from bagua_ref.conformance.trace import Recorder, TraceError, diff_records, digest
from bagua_ref.conformance.trace.causes import CAUSES

GOLDEN = [
    "a55d4fcade95df72",
    "ca3aad378ed2a9cc",
    "3b6997c59bd7b4cc",
    "e28098a8970f303b",
    "7c7b5d5beb0ed3f2",
    "092d6a634bf672a7",
]
"""Digests that must never change: records from other machines and versions have them."""

SIZES = [1, 2, 17, 2051, 16_383, 16_384, 16_385, 16_386, 70_001, 2**20 + 3, 2**21 + 2]


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_tells_any_single_bit(size: int) -> None:
    x = torch.randn(size)
    right, bits = digest(x), x.view(torch.int32)
    places = {0, size - 1, size // 2, *(random.Random(size).randrange(size) for _ in range(6))}
    for place in sorted(places):
        for bit in (0, 1, 22, 23, 30, 31):
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
            assert digest(x) != right, (place, bit)
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest(x) == right


def test_near_values_do_not_collide() -> None:
    x = torch.linspace(-1, 1, 18_000)
    seen = {digest(x)}
    changed = 0
    # pairs of values that change together, near or in the same lane of another row
    for distance in range(1, 60):
        for flip in (1, -(2**31), 2**22):
            y = x.clone()
            bits = y.view(torch.int32)
            bits[100] ^= flip
            bits[100 + distance * 2 if distance < 30 else 100 + (distance - 29) * 563] ^= flip
            seen.add(digest(y))
            changed += 1
    for shift in range(1, 200):
        seen.add(digest(x.roll(shift)))
        seen.add(digest(x + shift * 2**-20))
        changed += 2
    assert len(seen) == changed + 1


def test_a_digest_tells_order_dtype_and_shape_but_not_strides() -> None:
    for size in (6, 60, 12_000, 60_000):
        x = torch.arange(size, dtype=torch.float32)
        others = [
            x.flip(0),
            x.view(torch.int32),
            x.reshape(2, -1),
            x.reshape(-1, 2),
            x[:-1],
            x[:0],
            torch.cat([x[1:], x[:1]]),
        ]
        swapped = x.clone()
        swapped[[0, 1]] = x[[1, 0]]
        assert len({digest(y) for y in (x, swapped, *others)}) == len(others) + 2
        square = x.reshape(2, -1)
        assert digest(square.t().contiguous().t()) == digest(square)
        assert digest(torch.stack([x, -x], 1)[:, 0]) == digest(x)
        assert digest(torch.cat([x[:1], x])[1:]) == digest(x)  # words at odd places
    zeros = [torch.zeros(n) for n in (0, 1, 2, 3, 20_000, 20_001, 20_002)]
    assert len({digest(x) for x in zeros}) == len(zeros)
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))


def test_digests_are_those_of_any_machine() -> None:
    found = [digest(torch.arange(size, dtype=torch.float32)) for size in (4, 2051, 20_003)]
    halves = [digest(torch.arange(size).to(torch.bfloat16)) for size in (4, 4099, 40_003)]
    assert [f"{number:016x}" for number in (*found, *halves)] == GOLDEN


def test_S_a_digest_follows_its_definition() -> None:
    x = torch.randn(2 * 512 + 3, generator=torch.Generator().manual_seed(1)).double()
    data, drawn = x.numpy().tobytes(), hashlib.shake_128(b"digest").digest(2 * 4096)
    k = [
        int.from_bytes(drawn[place : place + 8], "little") | 1 for place in range(0, len(drawn), 8)
    ]
    sums = b""
    for row in (data[:4096], data[4096:8192]):
        words = [row[place : place + 8] for place in range(0, 4096, 8)]
        for keys, order in ((k[:512], "little"), (k[512:], "big")):
            total = sum(
                key * int.from_bytes(word, order) for key, word in zip(keys, words, strict=True)
            )  # type: ignore[arg-type]
            sums += (total % 2**64).to_bytes(8, "little")
    hashed = hashlib.blake2b(
        f"{x.dtype} {list(x.shape)} ".encode() + sums + data[8192:], digest_size=8
    )
    assert digest(x) == int.from_bytes(hashed.digest(), "little")


def test_digests_by_threads_and_on_devices_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = torch.randn(2**21 + 2**19 + 1024)  # two threads of several blocks and a part
    data = x.view(torch.uint8)
    # too small for threads
    one = [_sums(data[start : start + 2**20].numpy()) for start in range(0, data.numel(), 2**20)]
    equal = _sums(data.numpy()) == _sums_on_device(data) == b"".join(one)
    assert equal  # by its name, as pytest would take long to show how so many bytes differ
    equal = _sums_on_device(data[4:-4092]) == _sums(data[4:-4092].numpy())
    assert equal


def test_flipped_signs_change_a_digest() -> None:
    """Signs are the highest bits of words, which a sum modulo 2^64 counts only as even or odd."""
    x = torch.randn(64, 512)
    changed = [
        -x,
        x.double(),
        -x.double(),
        *(x.where(torch.arange(512) % period != 1, -x) for period in (2, 4, 512)),
    ]
    z = torch.view_as_complex(x.view(64, 256, 2))
    changed += [z, z.conj(), z.to(torch.complex128), z.conj().to(torch.complex128)]
    assert len({digest(y) for y in (x, *changed)}) == len(changed) + 1


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    Training().run(folder, what="values")
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_located_and_named(fault: Fault, right: Path, tmp_path: Path) -> None:
    training = Training()
    fault.plant(training)
    training.run(tmp_path, what="values")
    for pair in ((right, tmp_path), (tmp_path, right)):
        first = diff_records(*pair).first
        assert first is not None
        assert (first.step, first.rank, first.record, first.cause) == (
            fault.step,
            0,
            fault.record,
            fault.cause,
        ), str(first)


def test_where_values_begin_to_be_infinite_is_said(right: Path, tmp_path: Path) -> None:
    training = Training()
    next(fault for fault in FAULTS if fault.name == "a division by zero").plant(training)
    training.run(tmp_path)
    assert diff_records(right, tmp_path).not_finite == {"B": f"step {AT}, rank 0, output:"}


def test_every_cause_has_a_meaning_and_faults_are_many() -> None:
    assert len(FAULTS) >= 30
    assert {fault.cause for fault in FAULTS} <= set(CAUSES)


def test_a_hidden_update_is_found(tmp_path: Path) -> None:
    for name, plant in (("a", plain_sgd), ("b", hidden_update)):
        training = Training()
        plant(training)
        training.run(tmp_path / name)
    first = diff_records(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.step, first.record, first.cause) == (0, "weight:0.weight", "update")


def test_a_recorded_training_computes_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for folder in (None, tmp_path):
        training, seen = Training(), []
        training.part("0").weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        training.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(torch.ones(1)))
        training.run(folder, **({"what": "values"} if folder else {}))
        weights.append(
            [*training.model.state_dict().values(), *seen, torch.get_rng_state(), torch.rand(3)]
        )
        assert not training.model._forward_hooks
        assert not training.model._forward_pre_hooks
    assert len(weights[0]) == len(weights[1]) > 2 * STEPS
    assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))


def test_equal_runs_do_not_differ_also_restarted(right: Path, tmp_path: Path) -> None:
    first = Training()
    first.run(tmp_path)
    index = tmp_path / "rank0" / "steps.jsonl"
    index.write_bytes(index.read_bytes()[:-20])  # killed while it wrote the last line
    second = Training()
    saved = Training()
    saved.run(None, stop=4)  # a checkpoint after four steps; the fifth is lost
    state = torch.get_rng_state()
    second.model.load_state_dict(saved.model.state_dict())
    second.optimizer.load_state_dict(saved.optimizer.state_dict())
    second.first = 4
    torch.set_rng_state(state)
    second.run(tmp_path, stop=5)
    assert diff_records(right, tmp_path).steps == [0, 1, 2, 3, 4]  # not the step that was lost
    second.first = 5
    second.run(tmp_path)
    report = diff_records(right, tmp_path)
    assert report.first is None, str(report)
    assert report.steps == list(range(STEPS))


def test_a_closure_is_recorded_when_it_has_run(right: Path, tmp_path: Path) -> None:
    training = Training()
    optimizer = training.optimizer
    computed: list[Tensor] = []
    training.backward = lambda k, loss: computed.append(loss)  # type: ignore[method-assign]

    def closure() -> Tensor:
        optimizer.zero_grad()
        computed[-1].backward()
        return computed[-1]

    training.step = lambda k: optimizer.step(closure)  # type: ignore[arg-type, method-assign]
    training.run(tmp_path)
    report = diff_records(right, tmp_path)
    assert report.first is None, str(report)
    assert report.records == diff_records(right, right).records


def test_a_pass_without_gradients_is_not_recorded(right: Path, tmp_path: Path) -> None:
    training = Training()

    def validate(k: int) -> None:
        training.model.eval()
        with torch.no_grad():
            training.model(torch.ones(2, 6))
        training.model.train()

    training.before = validate  # type: ignore[method-assign]
    training.run(tmp_path)
    assert diff_records(right, tmp_path).first is None


def test_a_generator_that_nothing_uses_is_noted_only(right: Path, tmp_path: Path) -> None:
    for name, plant in (
        ("equal", None),
        ("lr", next(fault for fault in FAULTS if fault.cause == "learning rate").plant),
    ):
        training = Training()
        random.seed(1)
        if plant is not None:
            plant(training)
        training.run(tmp_path / name)
        report = diff_records(right, tmp_path / name)
        assert "python from step 0 on" in report.notes[-1]
        assert (
            report.first is None
            if plant is None
            else report.first is not None and report.first.cause == "learning rate"
        )


def test_a_restart_without_momentum_is_found(right: Path, tmp_path: Path) -> None:
    Training().run(tmp_path, stop=AT)
    second, saved = Training(), Training()
    saved.run(None, stop=AT)
    state = torch.get_rng_state()
    second.model.load_state_dict(saved.model.state_dict())
    second.first = AT
    torch.set_rng_state(state)
    second.run(tmp_path)
    first = diff_records(right, tmp_path).first
    assert first is not None
    assert (first.step, first.kind, first.cause) == (AT, "start", "restored state")
    assert first.record.startswith("state:0.weight")


def test_a_record_that_was_cut_off_is_readable_up_to_its_end(right: Path, tmp_path: Path) -> None:
    Training().run(tmp_path)
    index = tmp_path / "rank0" / "steps.jsonl"
    whole = index.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    for steps, size in ((1, ends[0] + 1), (3, ends[2] + 1), (3, ends[2] + 50), (6, ends[6])):
        index.write_bytes(whole[:size])
        report = diff_records(right, tmp_path)
        assert report.first is None
        assert len(report.steps) == steps
    index.write_bytes(b"")
    with pytest.raises(TraceError, match="no step in common"):
        diff_records(right, tmp_path)
    for wrong, message in (
        (b'"step": "2"', "line 3"),
        (b'"start": [["weight:x", "no digest", null]], "step": 2', "not a name, a digest"),
    ):
        index.write_bytes(whole.replace(b'"step": 2', wrong))
        with pytest.raises(TraceError, match=message):
            diff_records(right, tmp_path)


def test_a_step_that_failed_is_written_as_far_as_it_went(right: Path, tmp_path: Path) -> None:
    training = Training()

    def fail(k: int) -> None:
        if k == AT:
            raise ArithmeticError

    training.after_backward = fail  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        training.run(tmp_path)
    report = diff_records(right, tmp_path)
    assert report.first is None
    assert report.steps == [0, 1, 2, AT]
    training = Training()
    training.forward = lambda k, x: training.model(x) * (2 if k == AT else 1)  # type: ignore[method-assign]
    training.after_backward = fail  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        training.run(tmp_path / "other")
    first = diff_records(right, tmp_path / "other").first
    assert first is not None
    assert (first.step, first.record, first.cause) == (AT, "loss:", "loss")


def test_values_of_a_window_and_the_command_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = next(fault for fault in FAULTS if fault.cause == "scaled gradient")
    for name in ("a", "b"):
        training = Training()
        if name == "b":
            fault.plant(training)
        training.run(tmp_path / name)
    assert main(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--window"]) == 1
    *_, command = capsys.readouterr().out.splitlines()
    monkeypatch.setenv("BAGUA_REF_RECORD", f"{AT}:{AT + 1}")
    for name in ("a", "b"):
        training = Training()
        if name == "b":
            fault.plant(training)
        training.run(tmp_path / name)
        kept = tmp_path / f"{name}-{AT}-{AT + 1}" / "rank0"
        assert [path.name for path in kept.glob("*.safetensors")] == [f"{AT:08d}.safetensors"]
    assert main([*command.split()[1:], "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["first"]
    assert (found["step"], found["record"]) == (fault.step, fault.record)
    assert found["index"] == [0]
    assert found["values"][1] == pytest.approx(128 * found["values"][0])


def test_the_command_line(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    training.seed = 1
    training.build()
    training.run(tmp_path / "b")
    assert main(["trace", "diff", str(right), str(right)]) == 0
    out = capsys.readouterr().out
    assert ", 1 rank, " in out
    assert out.endswith("EQUAL\n")
    assert (
        main(["trace", "diff", str(right), str(tmp_path / "b"), "--png", str(tmp_path / "x.png")])
        == 1
    )
    text = capsys.readouterr().out
    assert "random state" in text
    assert "DIFFERENT" in text
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert main(["trace", "diff", str(right), str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "everything"}, "'digests' or 'values'"),
        ({"window": (0, 1)}, "must be None with what='digests'"),
        ({"what": "values", "window": (2, 2)}, "first step with values"),
        ({"first_step": -1}, "must be 0 or more"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Training().run(tmp_path, **options)
    assert not [*tmp_path.iterdir()]


def test_other_kinds_of_tensors_and_modules(tmp_path: Path) -> None:
    def run(folder: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.LazyLinear(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'2.weight' is not initialized"):
            bagua_ref.record(model, optimizer, folder)
        model(torch.tensor([[1, 2], [3, 1]]))
        called = wrap(model)
        with bagua_ref.record(
            called, optimizer, folder, [{"x": torch.tensor([[1, 2], [3, 1]]), "note": "text"}] * 3
        ) as recording:
            for batch in recording:
                recording.loss(called(batch["x"]).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

    run(tmp_path / "a", lambda model: model)
    run(tmp_path / "b", lambda model: torch.compile(model, backend="eager"))  # type: ignore[arg-type, return-value]
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None, str(report)
    assert report.records == 3 * 21


def test_a_setting_of_precision_of_newer_versions_is_no_error(tmp_path: Path) -> None:
    code = (
        "import torch, bagua_ref\nif hasattr(torch.backends, 'fp32_precision'):"
        " torch.backends.fp32_precision = 'tf32'\n"
    )
    code += (
        "m = torch.nn.Linear(1, 1)\nwith bagua_ref.record(m, torch.optim.SGD(m.parameters()),"
        f" {str(tmp_path)!r}): pass"
    )
    ended = run_script(code)
    assert ended.returncode == 0, ended.stderr


def test_a_folder_with_a_record_is_not_overwritten(right: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds a trace"):
        Training().run(right)
    with Recorder(tmp_path, rank=0, world_size=1):
        pass
    with pytest.raises(ValueError, match="of another kind"):
        Training().run(tmp_path, first_step=0)


def test_a_folder_of_another_kind_is_named(
    right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operations, mixed, newer, begun, empty = (
        tmp_path / name for name in ("operations", "mixed", "newer", "begun", "empty")
    )
    for folder in (operations, mixed):
        with Recorder(folder, rank=0, world_size=2 if folder is mixed else 1) as recorder:
            recorder.before_op("all", torch.ones(3))
            recorder.after_op("all", torch.ones(3))
    Training().run(mixed, rank=1, world_size=2)
    shutil.copytree(right, newer)
    manifest = newer / "rank0" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"trace_version": "1"', '"trace_version": "2"')
    )
    recording = bagua_ref.record(
        nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), begun
    )
    empty.mkdir()
    command = "for `bagua-ref trace {}`; here".format
    with recording:  # under way
        for arguments, message in (
            (["show", right], command("diff")),
            (["check", right], command("diff")),
            (["diff", operations, right], command("check")),
            (["diff", right, mixed], "rank0' holds inputs and outputs"),
            (["check", mixed], "rank1' holds digests"),
            (["diff", right, empty], "holds no trace"),
            (["diff", right / "rank0", right], "of one rank: pass"),
            (["diff", right, newer], "this bagua_ref reads '1'"),
            (["diff", right, begun], "no step in common: 0 to 6 and none"),
        ):
            assert main(["trace", *map(str, arguments)]) == 2
            said = capsys.readouterr().err
            assert message in said, said
            assert said.count("\n") == 1
