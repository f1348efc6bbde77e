"""Tests of what leads from a failure to its cause: crashes, shrinking, fields, scripts in files,
and what was not tried.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.wrong_target import Wrong, WrongKernels, healed

from bagua_ref import contrib
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.cli import main
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.checks.registry import checks_of
from bagua_ref.conformance.expected.codecs_scalar import MINMAX, field_at, payload_size


def only(target, check, **options):
    (failed,) = run_conformance(target, checks=[check], **options).failures()
    return failed


class WrongInTwo(ReferenceBackend):
    def _reduce_chunks_(self, x, num_chunks, target_chunk, average):
        super()._reduce_chunks_(x, num_chunks, target_chunk, average)
        if num_chunks >= 2 and x.numel():
            x[0] = 12345


@pytest.mark.slow
def test_shrinking_goes_on_to_the_smallest_number_of_chunks():
    failed = only(WrongKernels(), "kernels.S3.7.reduce_chunks[float32]")
    assert "num_chunks = 1\n" in failed.counterexample
    failed = only(WrongInTwo(), "kernels.S3.7.reduce_chunks[float32]")
    assert "num_chunks = 2\n" in failed.counterexample


def test_a_payload_that_differs_names_the_field():
    failed = run_conformance(
        WrongKernels(), checks=["codec.S4.2.levels[float16]"], jobs=0, shrink=False
    ).failures()[0]
    assert "compress: result, minimum of chunk 0: " in failed.message


@pytest.mark.parametrize(
    ("codec", "place", "field"),
    [
        (MINMAX, 0, "minimum of chunk 0"),
        (MINMAX, 7, "maximum of chunk 0"),
        (MINMAX, 8, "gap after the maximum of chunk 0"),
        (MINMAX, 32, "level of element 0 of chunk 0"),
        (MINMAX, payload_size(MINMAX, 33) - 1, "padding of chunk 0"),
        ("MXFP8", 1, "scale of block 1 of chunk 0"),
        ("MXFP8", 2, "code of element 0 of chunk 0"),
        ("MXFP4", payload_size("MXFP4", 33) + 2 + 16, "code of element 32 of chunk 1"),
        ("OneBit", 3, "scale of chunk 0"),
        ("OneBit", 31, "gap after the scale of chunk 0"),
        ("OneBit", 33, "signs of elements 8 to 15 of chunk 0"),
        ("OneBit", 36, "signs of element 32 of chunk 0"),
    ],
)
def test_S4_S12_every_byte_belongs_to_a_field(codec, place, field):
    assert field_at(codec, place, 33, "float32") == field


@pytest.mark.parametrize(
    "row",
    [
        "codec.S12.2.target_chunk_OneBit[float16]",
        "codec.S12.3.bound_MXFP8[float16]",
        "codec.S4.5.refuses[int32]",
    ],
)
def test_a_script_fails_by_itself_and_passes_on_the_reference(row):
    script = (
        run_conformance(Wrong(), checks=[row], jobs=0, shrink=False).failures()[0].counterexample
    )
    with pytest.raises(AssertionError):
        exec(script, {})
    exec(healed(script), {})


def test_a_clause_stands_for_its_parts():
    report = run_conformance(SimpleNamespace(samplers=object()), ["codec"], checks=["S4"])
    assert {result.id.partition("[")[0] for result in report.results} == {
        name for name, check in checks_of(["codec"]).items() if check.clause.startswith("S4.")
    }


def test_the_last_lines_say_what_was_not_tried(capsys):
    assert main(["verify", "--backend", "reference", "--suite", "samplers", "collectives"]) == 2
    *_, last, offer = capsys.readouterr().out.splitlines()
    assert last == "not tried, as the target lacks these parts: collectives, samplers"
    assert offer.startswith("--backend reference has kernels only; --target reference checks")
    report = run_conformance(SimpleNamespace(samplers=contrib), checks=["samplers.S7.1.lengths"])
    assert "not tried" not in str(report)


@pytest.mark.parametrize("more", [["--backend", "reference"], ["--command", "true"]])
def test_a_target_is_named_once(capsys, more):
    assert main(["verify", "--target", "reference", *more]) == 2
    assert "one of --backend, --target" in capsys.readouterr().err
