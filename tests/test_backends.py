"""Tests of choosing a backend, and of kernels beyond the properties: bad arguments, large sizes,
threads.
"""

from __future__ import annotations

import sys
import threading
from importlib.metadata import EntryPoint

import pytest
import torch
from tests.threads import assert_right_on_threads

import bagua_ref.backends as registry
from bagua_ref.backends import (
    available_backends,
    get_backend,
    get_codec,
    register_backend,
    use_backend,
)
from bagua_ref.backends.reference import ReferenceBackend, backend
from bagua_ref.backends.reference.backend import BLOCK
from bagua_ref.conformance import EXACT, SUM, ULP, assert_equal
from bagua_ref.errors import BackendUnavailableError

kernels = get_backend("reference")


class Other(ReferenceBackend):
    name = "other"


class NoDevice(ReferenceBackend):
    name = "no-device"

    @classmethod
    def unavailable_reason(cls) -> str:
        return "this machine has no such device"


@pytest.fixture
def clean(monkeypatch):
    """Give the test its own registry, with two more backends and without those that properties
    add.
    """
    ours = {
        name: registration
        for name, registration in registry._registered.items()
        if name in ("cuda", "reference")
    }
    monkeypatch.setattr(registry, "_registered", ours)
    monkeypatch.setattr(registry, "_instances", {})
    monkeypatch.setattr(registry, "_process_wide", [])
    monkeypatch.delenv("BAGUA_REF_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "others", sys.modules[__name__])
    register_backend("other", "others:Other")
    register_backend("no-device", "others:NoDevice", hint="pip install a-device")


@pytest.mark.usefixtures("clean")
class TestChoice:
    def test_the_reference_is_the_default_and_one_instance(self):
        assert isinstance(get_backend(), ReferenceBackend)
        assert get_backend() is get_backend("reference") is get_backend(None, device="cpu")

    def test_an_instance_is_returned_as_it_is(self):
        mine = Other()
        assert get_backend(mine) is mine

    def test_argument_before_use_backend_before_variable(self, monkeypatch):
        monkeypatch.setenv("BAGUA_REF_BACKEND", "other")
        assert get_backend().name == "other"
        use_backend("reference")
        assert get_backend().name == "reference"
        assert get_backend("other").name == "other"
        use_backend(None)
        assert get_backend().name == "other"

    def test_a_cuda_tensor_gets_the_reference_where_cuda_cannot_run(self, monkeypatch):
        monkeypatch.setitem(
            registry._registered, "cuda", registry._Registration("others:NoDevice", "")
        )
        assert get_backend(None, device="cuda:0").name == "reference"

    def test_a_cuda_tensor_gets_cuda_where_it_can_run(self, monkeypatch):
        monkeypatch.setitem(
            registry._registered, "cuda", registry._Registration("others:Other", "")
        )
        assert get_backend(None, device=torch.device("cuda", 1)).name == "other"
        assert get_backend(None, device="cpu").name == "reference"
        use_backend("reference")
        assert get_backend(None, device="cuda:1").name == "reference"

    def test_the_block_ends_the_choice(self):
        with use_backend("other"):
            assert get_backend().name == "other"
            with use_backend(None):
                assert get_backend().name == "reference"
            with use_backend("reference"):
                assert get_backend().name == "reference"
            assert get_backend().name == "other"
        assert get_backend().name == "reference"

    def test_the_block_goes_before_the_process_and_leaves_it_as_it_was(self):
        use_backend("other")

        def fail() -> None:
            assert get_backend().name == "reference"
            raise KeyError

        with pytest.raises(KeyError), use_backend("reference"):
            fail()
        assert get_backend().name == "other"

    def test_one_thread_s_block_is_not_another_s(self):
        seen, inside, done = [], threading.Event(), threading.Event()

        def other_thread() -> None:
            inside.wait(10)
            seen.append(get_backend().name)
            use_backend("other")
            done.set()

        thread = threading.Thread(target=other_thread)
        thread.start()
        with use_backend("other"):
            inside.set()
            done.wait(10)
        thread.join()
        assert seen == ["reference"]
        # the call outside a context applies to the whole process
        assert get_backend().name == "other"

    def test_a_world_s_thread_takes_the_block_along(self):
        from bagua_ref.base.runtime import current_world

        seen: list[str] = []
        with use_backend("other"):
            thread = current_world().spawn(lambda: seen.append(get_backend().name), "test")
        thread.join()
        assert seen == ["other"]

    def test_an_unknown_name_lists_what_is_installed(self, monkeypatch):
        message = (
            r"'fast'\W+is not a known kernel backend; installed are 'cuda', 'no-device', 'other',"
            r" 'reference'"
        )
        with pytest.raises(ValueError, match=message):
            get_backend("fast")
        with pytest.raises(ValueError, match=message):
            use_backend("fast")
        assert get_backend().name == "reference"
        monkeypatch.setenv("BAGUA_REF_BACKEND", "fast")
        with pytest.raises(ValueError, match="BAGUA_REF_BACKEND=" + message):
            get_backend()

    def test_what_is_no_name_is_a_type_error(self):
        with pytest.raises(TypeError, match="backend=3 must be a name, a KernelBackend or None"):
            get_backend(3)

    def test_asked_for_and_not_able_is_an_error_with_reason_and_advice(self):
        for ask in (get_backend, use_backend):
            with pytest.raises(
                BackendUnavailableError,
                match=r"no-device.* this machine has no such device; pip install a-device",
            ):
                ask("no-device")
        assert get_backend().name == "reference"

    def test_available_backends_says_why_not(self):
        register_backend(
            "broken", "no_such_package.kernels:Backend", hint="pip install no-such-package"
        )
        register_backend("wrong", "json:JSONDecoder")
        reasons = available_backends()
        assert reasons["reference"] is None
        assert reasons["other"] is None
        assert "this machine has no such device" in reasons["no-device"]
        assert "no_such_package.kernels is not installed" in reasons["broken"]
        assert "json:JSONDecoder is not a KernelBackend class" in reasons["wrong"]
        assert set(reasons) == {"cuda", "reference", "other", "no-device", "broken", "wrong"}

    def test_a_missing_dependency_is_named_with_what_to_install(self, monkeypatch, tmp_path):
        (tmp_path / "needy_backend.py").write_text("import no_such_dependency\n")
        (tmp_path / "failing_backend.py").write_text("raise OSError('the driver is too old')\n")
        monkeypatch.syspath_prepend(tmp_path)
        register_backend("needy", "needy_backend:Backend", hint="pip install no-such-dependency")
        with pytest.raises(
            BackendUnavailableError,
            match="No module named 'no_such_dependency'; pip install no-such-dependency",
        ):
            get_backend("needy")
        register_backend("failing", "failing_backend:Backend")
        with pytest.raises(
            BackendUnavailableError,
            match="importing failing_backend: OSError: the driver is too old",
        ):
            get_backend("failing")

    def test_a_name_stands_for_one_target(self):
        register_backend("other", "others:Other")
        with pytest.raises(
            ValueError, match="name='other' is already registered for 'others:Other'"
        ):
            register_backend("other", "elsewhere:Other")
        with pytest.raises(
            ValueError, match="target='elsewhere' must be of the form 'module:Class'"
        ):
            register_backend("new", "elsewhere")
        with pytest.raises(TypeError, match="name=5 must be a string"):
            register_backend(5, "others:Other")

    def test_another_package_s_entry_point_is_imported_only_when_asked_for(
        self, monkeypatch, tmp_path
    ):
        (tmp_path / "third_party_kernels.py").write_text(
            "from bagua_ref.backends.reference import ReferenceBackend\nclass"
            " Third(ReferenceBackend):\n    name = 'third'\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        point = EntryPoint("third", "third_party_kernels:Third", "bagua_ref.backends")
        monkeypatch.setattr(
            registry, "entry_points", lambda group: [point] if group == point.group else []
        )
        with pytest.raises(ValueError, match=r"installed are .*'third'"):
            get_backend("fast")
        assert "third_party_kernels" not in sys.modules
        assert get_backend("third").name == "third"
        assert available_backends()["third"] is None


SMALL = torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k: k.add_([1.0], SMALL), TypeError, "x is a list; it must be a torch.Tensor"),
        (
            lambda k: k.add_(SMALL.int(), SMALL.int()),
            TypeError,
            "x is torch.int32; it must be one of torch.float16",
        ),
        (
            lambda k: k.add_(SMALL, SMALL.half()),
            TypeError,
            "y is torch.float16; with x of torch.float32 it must be torch.float32",
        ),
        (
            lambda k: k.add_(SMALL, torch.zeros(5)),
            ValueError,
            "y has 5 elements; with x of 4 it must have 4",
        ),
        (
            lambda k: k.add_(torch.zeros(2, 2), SMALL),
            ValueError,
            r"x of shape \(2, 2\) .* must be 1-D and contiguous",
        ),
        (
            lambda k: k.add_(torch.zeros(8)[::2], SMALL),
            ValueError,
            r"x of shape \(4,\) and strides \(2,\) must be",
        ),
        (
            lambda k: k.add_(torch.zeros(4).to_sparse(), SMALL),
            ValueError,
            "must be 1-D and contiguous",
        ),
        (
            lambda k: k.add_(SMALL, SMALL),
            ValueError,
            "y overlaps x in memory; they must not overlap",
        ),
        (
            lambda k: k.subtract_(torch.zeros(4), torch.zeros(4, device="meta")),
            ValueError,
            "y is on meta; it must be on x's device cpu",
        ),
        (
            lambda k: k.add_scaled_(torch.zeros(4), SMALL, "half"),
            TypeError,
            "factor='half' must be a number",
        ),
        (lambda k: k.divide_(torch.zeros(4), 0), ValueError, "divisor=0 is 0"),
        (
            lambda k: k.divide_(torch.zeros(4), 1e-60),
            ValueError,
            "divisor=1e-60 is 0 in torch.float32 arithmetic",
        ),
        (
            lambda k: k.combine_ring_(SMALL, torch.zeros(4), torch.zeros(4), SMALL),
            ValueError,
            "weight overlaps x in memory",
        ),
        (
            lambda k: k.combine_ring_(SMALL, torch.zeros(4), torch.zeros(3), torch.zeros(4)),
            ValueError,
            "right has 3 elements",
        ),
        (
            lambda k: k.async_average_(SMALL, torch.zeros(4), torch.zeros(4), 0),
            ValueError,
            "nranks=0 must be at least 1",
        ),
        (
            lambda k: k.async_average_(SMALL.half(), SMALL.half(), SMALL.half(), 2),
            TypeError,
            "reduced is torch.float16; .* torch.float32",
        ),
        (
            lambda k: k.update_momentum_(SMALL, torch.zeros(4), 1.5),
            ValueError,
            "beta1=1.5 must be from 0 to 1",
        ),
        (
            lambda k: k.update_momentum_(SMALL, torch.zeros(4), float("nan")),
            ValueError,
            "beta1=nan must be from 0 to 1",
        ),
        (
            lambda k: k.update_momentum_(SMALL, torch.zeros(4), "most"),
            TypeError,
            "beta1='most' must be a number",
        ),
        (
            lambda k: k.update_momentum_(SMALL, torch.zeros(3), 0.9),
            ValueError,
            "grad has 3 elements; with m of 4",
        ),
        (lambda k: k.reduce_chunks_(SMALL, 3, 0, True), ValueError, "num_chunks=3 must divide"),
        (
            lambda k: k.reduce_chunks_(SMALL, 2, 2, True),
            ValueError,
            "target_chunk=2 must be from 0 to",
        ),
        (
            lambda k: k.gather_flat([SMALL, SMALL], torch.zeros(7)),
            ValueError,
            "tensors have 8 elements in total",
        ),
        (
            lambda k: k.gather_flat([SMALL.half()], torch.zeros(4)),
            TypeError,
            r"tensors\[0\] is torch.float16; it must be out's dtype",
        ),
        (
            lambda k: k.gather_flat([3], torch.zeros(4)),
            TypeError,
            r"tensors\[0\] is a int; it must be a torch.Tensor",
        ),
        (
            lambda k: k.gather_flat([SMALL.to("meta")], torch.zeros(4)),
            ValueError,
            r"tensors\[0\] is on meta",
        ),
        (
            lambda k: k.scatter_flat(SMALL, [SMALL.view(2, 2).t()]),
            ValueError,
            r"tensors\[0\] overlaps flat in memory",
        ),
        (lambda k: k.order_by_complexity(torch.zeros(2, 2)), ValueError, "keys of shape"),
        (
            lambda k: k.order_by_complexity(torch.zeros(2, dtype=torch.complex64)),
            TypeError,
            "keys is torch.complex64",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(kernels)
    assert_equal(SMALL, torch.zeros(4), EXACT)


def test_a_backend_for_one_kind_of_device_refuses_the_others():
    class OnlyCuda(Other):
        device_types = ("cuda",)

    with pytest.raises(ValueError, match="x is on cpu; backend 'other' works on cuda tensors"):
        OnlyCuda().add_(torch.zeros(1), torch.zeros(1))


def run_every_kernel(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the results of every kernel on fixed numbers on ``device``, moved to the CPU."""
    numbers = (
        torch.randn(5, 2 * BLOCK + 6, generator=torch.Generator().manual_seed(4))
        .to(dtype)
        .to(device)
    )
    x, y, left, right = numbers[0], numbers[1], numbers[2], numbers[3]
    kernels.add_(x, y)
    kernels.subtract_(x, left)
    kernels.add_scaled_(x, y, 0.1)
    kernels.average_(x, right)
    kernels.divide_(x, 7)
    kernels.combine_ring_(x, left, right, y)
    kernels.async_average_(
        x, left.to(torch.float64 if dtype is torch.float64 else torch.float32), right, 3
    )
    kernels.update_momentum_(x, y, 0.9)
    kernels.reduce_chunks_(x, 2, 1, average=True)
    results = [x, kernels.order_by_complexity(x)]
    if dtype is not torch.float64:
        payload = get_codec("MinMaxUInt8", kernels).compress(x, 2)
        get_codec("MinMaxUInt8", kernels).compress(y, 2, target_chunk=1, out=payload)
        get_codec("MinMaxUInt8", kernels).decompress(payload, 2, y)
        results += [payload, y]
    flat = torch.empty_like(x)
    kernels.gather_flat([left[5:], right[:5]], flat)
    kernels.scatter_flat(flat, [left[:4], right[4:]])
    return [result.cpu() for result in (*results, flat, left, right)]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_tensors_that_cannot_be_used_in_place_are_copied_in_and_out(dtype, monkeypatch):
    expected = run_every_kernel("cpu", dtype)
    monkeypatch.setattr(backend, "_usable", lambda x: False)
    for actual, wanted in zip(run_every_kernel("cpu", dtype), expected, strict=True):
        assert_equal(actual, wanted, EXACT)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_reference_gives_the_same_on_cuda_tensors(dtype):
    for actual, wanted in zip(
        run_every_kernel("cuda", dtype), run_every_kernel("cpu", dtype), strict=True
    ):
        assert_equal(actual, wanted, EXACT)


def test_autograd_does_not_see_the_kernels():
    parameter = torch.nn.Parameter(torch.ones(6))
    kernels.add_(parameter, torch.ones(6, requires_grad=True))
    kernels.reduce_chunks_(parameter, 2, 0, False)
    assert parameter.tolist() == [4.0] * 3 + [2.0] * 3
    kernels.scatter_flat(parameter, [torch.nn.Parameter(torch.zeros(2, 3))])
    get_codec("MinMaxUInt8", kernels).decompress(
        get_codec("MinMaxUInt8", kernels).compress(parameter, 2), 2, parameter
    )
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_infinities_are_results_and_warn_nobody(recwarn):
    x = torch.full((4,), 3e38)
    kernels.add_(x, torch.full((4,), 3e38))
    kernels.subtract_(x, torch.full((4,), float("inf")))
    get_codec("MinMaxUInt8", kernels).compress(x, 2)
    assert x.isnan().all()
    assert not recwarn.list


def test_kernels_on_many_threads_do_not_share_buffers():
    """16-bit kernels use the shared scratch buffers, so sharing between threads would show."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3 * BLOCK, generator=generator).to(torch.bfloat16) for _ in range(4)]
    expected = [get_codec("MinMaxUInt8", kernels).compress(x, 3) for x in inputs]
    assert_right_on_threads(
        lambda index: get_codec("MinMaxUInt8", kernels).compress(inputs[index], 3),
        expected,
        rounds=10,
    )


class TestTolerances:
    def test_exact_tells_the_sign_of_zero_but_not_the_bits_of_nan(self):
        nans = torch.tensor([0x7FC0, 0x7FFF], dtype=torch.int16).view(torch.bfloat16)
        assert_equal(nans[:1], nans[1:], EXACT)
        with pytest.raises(AssertionError, match=r"first at \(0,\): -0.0 instead of 0.0"):
            assert_equal(torch.tensor([-0.0]), torch.tensor([0.0]), EXACT)

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_ulp_counts_steps(self, dtype):
        one = torch.ones(1, dtype=dtype)
        next_but_one = one + 2 * torch.finfo(dtype).eps
        assert_equal(next_but_one, one, ULP(2))
        assert_equal(-next_but_one, -one, ULP(2))
        with pytest.raises(AssertionError, match=r"tolerance ULP\(1\)"):
            assert_equal(next_but_one, one, ULP(1))

    def test_sum_grows_with_the_ranks_and_what_they_added(self):
        zero, off = torch.zeros(1), torch.tensor([3e-7])
        assert_equal(off, zero, SUM(4), magnitude=1.0)
        with pytest.raises(AssertionError, match=r"tolerance SUM\(2\)"):
            assert_equal(off, zero, SUM(2), magnitude=1.0)
        with pytest.raises(AssertionError, match=r"tolerance SUM\(4\)"):
            assert_equal(off, zero, SUM(4))

    @pytest.mark.parametrize(
        "tolerance", [EXACT, ULP(4), SUM(4)], ids=lambda tolerance: tolerance.name
    )
    def test_infinities_shapes_and_dtypes_are_never_tolerated(self, tolerance):
        largest = torch.tensor([torch.finfo(torch.float32).max])
        for actual in (
            torch.tensor([float("inf")]),
            torch.tensor([float("nan")]),
            largest.double(),
            largest.view(1, 1),
        ):
            with pytest.raises(AssertionError):
                assert_equal(actual, largest, tolerance)
        assert_equal(torch.tensor([float("inf")]), torch.tensor([float("inf")]), tolerance)
        with pytest.raises(AssertionError, match="1 of 2 elements differ"):
            assert_equal(torch.tensor([1, 2]), torch.tensor([1, 3]), tolerance)
