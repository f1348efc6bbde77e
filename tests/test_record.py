"""Tests of recordings: digests, files that survive crashes, and planted faults that are located and
named.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from tests.recorded_trainings import AT, FAULTS, STEPS, Fault, Training
from torch import Tensor, nn

import bagua_ref
from bagua_ref.cli import main
from bagua_ref.record import RecordingError, diff_records, digest, draw_distances


def test_a_digest_tells_order_dtype_and_shape_but_not_strides() -> None:
    x = torch.arange(6.0)
    one_bit = x.view(torch.int32).bitwise_xor(torch.tensor([1, 0, 0, 0, 0, 0], dtype=torch.int32))
    z = torch.view_as_complex(x.view(3, 2))
    others = [
        x.flip(0),
        one_bit.view(torch.float32),
        x.view(torch.int32),
        x.reshape(2, -1),
        x.reshape(-1, 2),
        x[:-1],
        x[:0],
        -x,
        z,
        z.conj(),
    ]
    assert len({digest(y) for y in (x, *others)}) == len(others) + 1
    square = x.reshape(2, -1)
    assert digest(square.t().contiguous().t()) == digest(square)
    assert digest(torch.stack([x, -x], 1)[:, 0]) == digest(x)
    assert digest(torch.stack([x, -x], 1)[:1, 0]) == digest(x[:1])
    assert digest(z.conj().conj().conj()) == digest(z.conj().resolve_conj())


def test_a_digest_follows_its_definition() -> None:
    assert f"{digest(torch.arange(4.0)):016x}" == "cbe6dc9ffcbf82a7"  # of any machine and version
    for x in (torch.randn(1027).double(), torch.randn(9).bfloat16(), torch.zeros(0, 2)):
        text = f"{x.dtype} {list(x.shape)} ".encode() + x.view(torch.uint8).numpy().tobytes()
        assert digest(x) == xxhash.xxh3_64_intdigest(text)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    Training().run(folder)
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
    training.run(tmp_path)
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


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("another dropout", "Dropout '3': p=0.2 in A, 0.5 in B"),
        ("bfloat16", "float32 [8, 6] cpu in A, bfloat16 [8, 6] cpu in B"),
        ("shuffled batches", "A has the batch of B in step 5, rank 0"),
        ("a batch left out", "B is one batch ahead from step 3 on"),
        ("another learning rate", "lr: 0.1 in A, 0.05 in B"),
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


def test_a_recorded_training_computes_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for folder in (None, tmp_path):
        training, seen = Training(), []
        training.part("0").weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        training.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(torch.ones(1)))
        training.run(folder)
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
        (b'"step": "2", "entries": [', "line 3"),
        (b'"step": 2, "entries": [["x", "no digest", null], ', "line 3: invalid literal"),
    ):
        index.write_bytes(whole.replace(b'"step": 2, "entries": [', wrong))
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


def test_the_command_line(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = planted("another seed", tmp_path / "b")
    assert main(["trace", "diff", str(right), str(right)]) == 0
    out = capsys.readouterr().out
    assert ", 1 rank, " in out
    assert out.endswith("EQUAL\nNext: nothing: both runs compute the same bits\n")
    picture = tmp_path / "x.png"
    assert main(["trace", "diff", str(right), str(other), "--png", str(picture)]) == 1
    text = capsys.readouterr().out
    assert "Likely cause: random state (initial weights differ" in text
    assert "\nDIFFERENT\nNext: stop both runs in step 0 and look at weight:" in text
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
    assert re.search(rf"^0 +{STEPS} +0 +{STEPS - 1} +complete$", shown, re.MULTILINE)
    assert "torch " + torch.__version__ in shown
    assert "1 batch, 3 rng, 1 settings, 3 buffer, 1 input" in shown
    assert main(["trace", "show", str(right), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [{"steps": [*range(STEPS)], "state": "complete"}]
    Training().run(tmp_path, stop=0)
    assert main(["trace", "show", str(tmp_path)]) == 0
    assert re.search(r"^0 +0 +- +- +complete$", capsys.readouterr().out, re.MULTILINE)


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


def test_other_kinds_of_tensors_and_modules(tmp_path: Path) -> None:
    def run(folder: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.LazyLinear(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def test_a_full_disk_stops_recording_and_training_goes_on(right: Path, tmp_path: Path) -> None:
    training = Training()
    recording = bagua_ref.record(training.model, training.optimizer, tmp_path, training.batches)

    def train() -> None:
        with recording:
            for k, x in enumerate(recording):
                if k == AT:
                    recording._index = Path("/dev/full").open("w")  # noqa: SIM115
                recording.loss(training.loss(k, training.forward(k, x))).backward()
                training.step(k)

    with pytest.warns(RuntimeWarning, match=f"step {AT} cannot be written: .*Training continues"):
        train()
    report = diff_records(right, tmp_path)
    assert report.first is None
    assert report.steps == [*range(AT)]
    assert any("did not end, or stopped" in note for note in report.notes)


def test_a_folder_with_a_recording_is_not_overwritten(right: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already holds a recording"):
        Training().run(right)
    Training().run(tmp_path, rank=0, world_size=2)
    with pytest.raises(ValueError, match="of another number of ranks or format"):
        Training().run(tmp_path, first_step=0)


def test_what_cannot_be_read_is_named(
    right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, mixed, newer, begun, empty = (
        tmp_path / name for name in ("lost", "mixed", "newer", "begun", "empty")
    )
    Training().run(lost, rank=0, world_size=2)
    two = tmp_path / "two"
    for folder, rank, of in ((mixed, 0, 2), (mixed, 1, 3), (two, 0, 2), (two, 1, 2)):
        Training().run(folder, rank=rank, world_size=of)
    shutil.copytree(right, newer)
    manifest = newer / "rank0" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("recording 2", "recording 3"))
    empty.mkdir()
    recording = bagua_ref.record(
        nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), begun
    )
    with recording:  # under way
        for arguments, message in (
            (["diff", right, lost], "recordings of all ranks; it holds rank 0 of 2"),
            (["show", mixed], "it holds rank 0 of 2, rank 1 of 3"),
            (["diff", right, empty], "holds no recording"),
            (["diff", right, newer], "its format is not 'bagua_ref recording 2'"),
            (["diff", right, begun], "no step in common: 0 to 6 and none"),
            (["diff", right, two], "is of 1 ranks and"),
        ):
            assert main(["trace", *map(str, arguments)]) == 2, arguments
            said = capsys.readouterr().err
            assert message in said, said
            assert said.count("\n") == 2
