"""Tests of recordings: digests, files that survive crashes, and planted faults that are located and
named.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.recorded_trainings import AT, FAULTS, STEPS, Fault, Training, hidden_update, plain_sgd
from torch import Tensor, nn

import bagua_ref
from bagua_ref.cli import main
from bagua_ref.record import RecordingError, diff_records, digest, draw_distances
from bagua_ref.record.causes import CAUSES, UNCERTAIN
from bagua_ref.record.digests import _sums, _sums_on_device

GOLDEN = [
    "a55d4fcade95df72",
    "ca3aad378ed2a9cc",
    "3b6997c59bd7b4cc",
    "e28098a8970f303b",
    "7c7b5d5beb0ed3f2",
    "092d6a634bf672a7",
]
"""Digests of other machines and versions, which must not change."""


@pytest.mark.parametrize("size", [1, 2, 17, 2051, 16_385, 70_001, 2**20 + 3])
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


def test_a_digest_tells_order_dtype_and_shape_but_not_strides() -> None:
    for size in (6, 12_000):
        x = torch.arange(size, dtype=torch.float32)
        others = [
            x.flip(0),
            x.view(torch.int32),
            x.reshape(2, -1),
            x.reshape(-1, 2),
            x[:-1],
            x[:0],
            x.roll(1),
        ]
        assert len({digest(y) for y in (x, *others)}) == len(others) + 1
        square = x.reshape(2, -1)
        assert digest(square.t().contiguous().t()) == digest(square)
        assert digest(torch.stack([x, -x], 1)[:, 0]) == digest(x)
        assert digest(torch.cat([x[:1], x])[1:]) == digest(x)  # words at odd places
    zeros = [torch.zeros(n) for n in (0, 1, 2, 3, 20_000, 20_001, 20_002)]
    assert len({digest(x) for x in zeros}) == len(zeros)


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
        sums += b"".join(
            (
                sum(a * int.from_bytes(b, order) for a, b in zip(keys, words, strict=True)) % 2**64
            ).to_bytes(8, "little")
            for keys, order in ((k[:512], "little"), (k[512:], "big"))
        )
    hashed = hashlib.blake2b(
        f"{x.dtype} {list(x.shape)} ".encode() + sums + data[8192:], digest_size=8
    )
    assert digest(x) == int.from_bytes(hashed.digest(), "little")


def test_digests_on_devices_are_the_same() -> None:
    data = torch.randn(2**19 + 1024).view(torch.uint8)  # several blocks and a part
    equal = _sums(data.numpy()) == _sums_on_device(data)
    assert equal  # by its name, as pytest would take long to show how so many bytes differ
    assert _sums_on_device(data[4:-4092]) == _sums(data[4:-4092].numpy())


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


def planted(name: str, folder: Path) -> Path:
    """Record a training with the fault of that name."""
    training = Training()
    next(fault for fault in FAULTS if fault.name == name).plant(training)
    training.run(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_located_and_named(fault: Fault, right: Path, tmp_path: Path) -> None:
    """Python's and NumPy's generators are unseeded in all of them, and never the cause."""
    training = Training()
    fault.plant(training)
    training.run(tmp_path, what="values")
    for pair in ((right, tmp_path), (tmp_path, right)):
        report = diff_records(*pair)
        first = report.first
        assert first is not None
        assert (first.step, first.rank, first.record, first.cause) == (
            fault.step,
            0,
            fault.record,
            fault.cause,
        ), str(report)
        if fault.cause == "random state":
            assert first.details.startswith(("that of torch", "initial weights"))
        else:
            (note,) = (note for note in report.notes if note.startswith("random states differ"))
            assert "(python from step 0 on, numpy from step 0 on" in note
            sure = note.endswith(", but this did not cause the divergence")
            assert sure == (fault.cause not in UNCERTAIN)


ONLY_WITH_VALUES = {"products added in another order"}
"""Of which norms are further apart than rounding makes them."""


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_digests_suffice_to_name_a_cause(fault: Fault, right: Path, tmp_path: Path) -> None:
    first = diff_records(right, planted(fault.name, tmp_path)).first
    assert first is not None
    assert first.step == fault.step
    assert first.cause == fault.cause, str(first)


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("another dropout", "Dropout '3': p=0.2 in A, 0.5 in B"),
        ("another momentum of statistics", "BatchNorm1d '1': momentum=0.1 in A, 0.5 in B"),
        ("bfloat16", "float32 [8, 6] cpu in A, bfloat16 [8, 6] cpu in B"),
        ("shuffled batches", "A has the batch of B in step 5, rank 0"),
        ("a batch left out", "B is one batch ahead from step 3 on"),
        ("another learning rate", "lr: 0.1 in A, 0.05 in B"),
        ("weight decay on biases", "weight_decay: 0 in A, 0.1 in B"),
        ("clipped norms", r"the gradients' norm is 0\.\d+ in A and 0.01 in B"),
        ("a division by zero", "in B, first in output:"),
        ("a summed loss", "B has 24 times what A has, a number of samples, elements or ranks"),
    ],
)
def test_details_say_what_differs(name: str, details: str, right: Path, tmp_path: Path) -> None:
    first = diff_records(right, planted(name, tmp_path)).first
    assert first is not None
    assert re.fullmatch(re.sub(r"([\[\]])", r"\\\1", details), first.details), first.details
    assert f"({first.details})" in str(diff_records(right, tmp_path))


def test_where_values_begin_to_be_infinite_is_said(right: Path, tmp_path: Path) -> None:
    report = diff_records(right, planted("a division by zero", tmp_path))
    assert report.not_finite == {"B": f"step {AT}, rank 0, output:"}


def test_every_cause_has_a_meaning_and_faults_are_many() -> None:
    assert len(FAULTS) >= 30
    assert {fault.cause for fault in FAULTS} <= set(CAUSES)
    assert set(UNCERTAIN) <= set(CAUSES)


def in_bfloat16(forward: Callable[..., Tensor], k: int, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return forward(k, x)


def test_autocast_is_named_though_the_output_is_float32(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.float() / 3

    for name in ("a", "b"):
        training = Training()
        training.model = Wide(training.model)
        if name == "b":
            training.forward = functools.partial(in_bfloat16, training.forward)  # type: ignore[method-assign]
        training.run(tmp_path / name)
    first = diff_records(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.record, first.cause) == ("output:", "dtype or device")
    assert first.details == "mode 'torch.autocast': cpu=None in A, torch.bfloat16 in B"


def test_an_input_that_is_not_finite_is_named_though_the_batch_is_equal(
    right: Path, tmp_path: Path
) -> None:
    for name, value, cause in (("a", float("nan"), "not finite"), ("b", 0.5, "other data")):
        training = Training()
        forward = training.forward
        training.forward = lambda k, x, f=forward, v=value: f(k, x * v if k == AT else x)  # type: ignore[method-assign, misc]
        training.run(tmp_path / name)
        first = diff_records(right, tmp_path / name).first
        assert first is not None
        assert (first.step, first.record, first.cause) == (AT, "input:0", cause)
        assert cause == "not finite" or first.details == "of the same batch"


def test_a_setting_without_an_effect_is_no_difference(right: Path, tmp_path: Path) -> None:
    training = Training()
    training.model.note = 7  # type: ignore[assignment]
    training.part("2").eval()  # nn.Tanh, which does the same in both modes
    training.run(tmp_path)
    report = diff_records(right, tmp_path)
    assert report.first is None
    assert report.notes[-1].endswith("numpy from step 0 on)")


def test_a_setting_of_a_later_module_is_not_blamed(right: Path, tmp_path: Path) -> None:
    training = Training()
    training.part("3").p = 0.5
    training.part("1").eps = 1e-2
    training.run(tmp_path, what="values")
    first = diff_records(right, tmp_path).first
    assert first is not None
    assert (first.record, first.cause) == ("module:1", "settings of a module")
    assert first.details == "BatchNorm1d '1': eps=1e-05 in A, 0.01 in B"
    training = Training()
    training.part("3").p = 0.5
    right_forward = training.forward

    def changed(k: int, x: Tensor) -> Tensor:
        training.part("0").weight.data.mul_(2)
        return right_forward(k, x)

    training.forward = changed  # type: ignore[method-assign]
    training.run(tmp_path / "b", what="values")
    first = diff_records(right, tmp_path / "b").first
    assert first is not None
    assert (first.record, first.cause) == ("module:0", "forward")


def test_a_generator_that_the_forward_pass_does_not_use_is_not_blamed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        training = Training()
        training.part("3").p = 0.0
        torch.manual_seed(1 if name == "b" else 2)
        if name == "b":
            training.loss = lambda k, y: y.abs().mean()  # type: ignore[method-assign]
        training.run(tmp_path / name)
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is not None
    assert (report.first.record, report.first.cause) == ("loss:", "loss")


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
    with pytest.raises(RecordingError, match="no step in common"):
        diff_records(right, tmp_path)
    for wrong, message in (
        (b'"step": "2"', "line 3"),
        (b'"start": [["weight:x", "no digest", null]], "step": 2', "line 3: invalid literal"),
    ):
        index.write_bytes(whole.replace(b'"step": 2', wrong))
        with pytest.raises(RecordingError, match=message):
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


def test_elements_are_shown_where_values_are_kept(right: Path, tmp_path: Path) -> None:
    training = Training()
    next(fault for fault in FAULTS if fault.name == "a scaled loss").plant(training)
    training.run(tmp_path / "b", what="values", window=(AT, AT + 1))
    kept = [path.name for path in (tmp_path / "b" / "rank0").glob("*.safetensors")]
    assert kept == [f"{AT:08d}.safetensors"]
    first = diff_records(right, tmp_path / "b").first
    assert first is not None
    assert first.index == [0]
    assert first.values is not None
    assert first.values[1] == pytest.approx(128 * first.values[0])


def test_the_command_line(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = planted("another seed", tmp_path / "b")
    assert main(["trace", "diff", str(right), str(right)]) == 0
    out = capsys.readouterr().out
    assert ", 1 rank, " in out
    assert out.endswith("EQUAL\n")
    picture = tmp_path / "x.png"
    assert main(["trace", "diff", str(right), str(other), "--png", str(picture)]) == 1
    text = capsys.readouterr().out
    assert "Likely cause: random state (initial weights differ" in text
    assert "record with what='values', window=(0, 1)" in text
    assert "\nDIFFERENT\n" in text
    assert picture.stat().st_size > 1000
    assert main(["trace", "diff", str(right), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["cause"] == "random state"
    assert found["distances"]["0"].keys() == {"loss", "grad", "weight"}


def test_a_recording_is_summarized(
    right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "show", str(right)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^   0 +{STEPS} +0 +{STEPS - 1} +{STEPS}  complete$", shown, re.MULTILINE)
    assert "torch " + torch.__version__ in shown
    assert "1 batch, 3 rng, 1 settings, 3 buffer, 1 input" in shown
    assert main(["trace", "show", str(right), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [{"steps": [*range(STEPS)], "values": STEPS, "state": "complete"}]
    Training().run(tmp_path, stop=0)
    assert main(["trace", "show", str(tmp_path)]) == 0
    assert re.search(r"^   0 +0 +- +- +0  complete$", capsys.readouterr().out, re.MULTILINE)


def test_the_picture_draws_only_what_both_runs_have_recorded(tmp_path: Path) -> None:
    for name in ("a", "b"):
        training = Training()
        with bagua_ref.record(training.model, training.optimizer, tmp_path / name) as recording:
            for k, x in enumerate(training.batches):
                loss = training.model(x).square().mean()
                (recording.loss(loss) if name == "a" else loss).backward()
                training.step(k)
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is not None  # B's loss is missing
    drawn = draw_distances(report).axes[0]
    assert {line.get_label() for line in drawn.lines} & {"loss", "grad", "weight"} == {
        "grad",
        "weight",
    }


def test_a_loss_that_only_some_steps_have_is_drawn_for_these(tmp_path: Path) -> None:
    for name in ("a", "b"):
        training = Training()
        with bagua_ref.record(training.model, training.optimizer, tmp_path / name) as recording:
            for k, x in enumerate(training.batches):
                loss = training.model(x).square().mean()
                (recording.loss(loss) if k % 2 else loss).backward()
                training.step(k)
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None
    (loss,) = (line for line in draw_distances(report).axes[0].lines if line.get_label() == "loss")
    assert [*loss.get_xdata()] == [1, 3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": "everything"}, "'digests' or 'values'"),
        ({"window": (0, 1)}, "must be None with what='digests'"),
        ({"what": "values", "window": (2, 2)}, "first step with values"),
        ({"first_step": -1}, "must be 0 or more"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be below world_size=2"),
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
    assert report.records == 3 * 17


def test_another_bit_generator_of_numpy_is_recorded(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        Training().run(tmp_path)
    finally:
        np.random.set_bit_generator(before)
    assert diff_records(tmp_path, tmp_path).first is None


def test_a_full_disk_stops_recording_and_training_goes_on(
    right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, recording = Training(), Path

    def full(k: int) -> None:
        if k == AT:

            def fail(*_: object) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("bagua_ref.record.recording.write_safetensors", fail)

    training.before = full  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match=f"step {AT} cannot be written: .*Training continues"):
        training.run(recording(tmp_path), what="values")
    report = diff_records(right, tmp_path)
    assert report.first is None
    assert report.steps == [*range(AT)]
    assert any("did not end, or stopped" in note for note in report.notes)


def test_a_folder_with_a_recording_is_not_overwritten(right: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds a recording"):
        Training().run(right)
    Training().run(tmp_path, rank=0, world_size=2)
    with pytest.raises(ValueError, match="of another number of ranks"):
        Training().run(tmp_path, first_step=0)


def test_what_cannot_be_read_is_named(
    right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, mixed, newer, begun, empty, damaged = (
        tmp_path / name for name in ("lost", "mixed", "newer", "begun", "empty", "damaged")
    )
    Training().run(lost, rank=0, world_size=2)
    Training().run(mixed, rank=0, world_size=2)
    Training().run(mixed, rank=1, world_size=3)
    for folder in (newer, damaged):
        shutil.copytree(right, folder)
    manifest = newer / "rank0" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("recording 1", "recording 2"))
    index = damaged / "rank0" / "steps.jsonl"
    index.write_text(index.read_text().replace('{\\"optimizer', "["))
    empty.mkdir()
    recording = bagua_ref.record(
        nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), begun
    )
    other = planted("another learning rate", tmp_path / "lr")
    with recording:  # under way
        for arguments, message in (
            (["diff", right, lost], "rank1/manifest.json' is missing"),
            (["show", mixed], "is of rank 1 of 3, not of rank 1 of 2"),
            (["diff", right, empty], "holds no recording"),
            (["show", right / "rank0"], "of one rank: pass"),
            (["diff", right, newer], "its format is not 'bagua_ref recording 1'"),
            (["diff", right, begun], "no step in common: 0 to 6 and none"),
            (["diff", damaged, other], "damaged': options are damaged"),
        ):
            assert main(["trace", *map(str, arguments)]) == 2, arguments
            said = capsys.readouterr().err
            assert message in said, said
            assert said.count("\n") == 1
