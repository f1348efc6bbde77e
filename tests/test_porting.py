"""Tests of the page for users of Bagua, and of names that are not provided."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from tests.launch import run_script
from tests.scripts import load_script

import bagua_ref
from bagua_ref.base.not_provided import MISSING, REPLACEMENTS
from bagua_ref.errors import BaguaError, NotProvidedError

porting = load_script("docs/_porting.py")


def names() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module, lines in porting.NAMES.items()
        for name, _, _ in porting.entries(module, lines)
    ]


def test_the_page_is_current() -> None:
    assert porting.PAGE.read_text() == porting.page(), "run: python docs/_porting.py"


def test_every_name_of_the_original_is_on_the_page_with_its_status() -> None:
    assert len(names()) == 346
    page = porting.PAGE.read_text()
    for module, lines in porting.NAMES.items():
        section = page.partition(f"### `bagua.torch_api.{module}`".replace(".`", "`"))[2].partition(
            "### "
        )[0]
        for name, status, remark in porting.entries(module, lines):
            assert section.count(f"| `{name}` | {status} |") == 1
            assert status in ("same", "changed", "not provided")
            assert remark or status == "same"


def test_no_remark_is_about_a_name_that_is_not_there() -> None:
    known = {f"{module}:{name}" for module, name in names()}
    assert {*porting.CHANGED, *porting.UNSUPPORTED} <= known


def test_what_is_left_out_and_what_is_not() -> None:
    status = {
        (m, name): s
        for m, lines in porting.NAMES.items()
        for name, s, _ in porting.entries(m, lines)
    }
    assert status["contrib.sync_batchnorm", "SyncBatchNorm"] == "not provided"
    assert status["data_parallel.distributed", "DistributedDataParallel"] == "changed"


@pytest.mark.parametrize(
    ("line", "found", "same", "added"),
    [
        ("f(a, b=1)", lambda a, b=1: 0, True, []),
        ("f(_, b)", lambda anything, b: 0, True, []),
        ("f(a, *b, **c)", lambda a, *b, **c: 0, True, []),
        ("f(op=ReduceOp.SUM)", lambda op=bagua_ref.ReduceOp.SUM: 0, True, []),
        ("f(a)", lambda a, *, b=1, **c: 0, True, ["`b`", "`**c`"]),
        ("f(a, b=1)", lambda a, b=2: 0, False, []),
        ("f(a, b=1)", lambda a, b: 0, False, []),
        ("f(a, b)", lambda b, a: 0, False, []),
        ("f(a, b)", lambda a: 0, False, []),
        ("f(a)", lambda a, b=1: 0, False, []),
        ("f(a, b)", lambda a, *, b: 0, False, ["`b`"]),
        ("f(a, *b)", lambda a, b: 0, False, []),
    ],
)
def test_a_difference_in_parameters_is_seen(
    line: str, found: Any, same: bool, added: list[str]
) -> None:
    assert porting.compare(line, found, False) == (same, added)


def test_other_parameters_need_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"send\(tensor, dst, comm=0\): say how in CHANGED"):
        porting.status_of("communication", "send", "send(tensor, dst, comm=0)")
    monkeypatch.setitem(porting.CHANGED, "communication:send", "comm is None")
    assert porting.status_of("communication", "send", "send(tensor, dst, comm=0)") == (
        "changed",
        "comm is None",
    )
    with pytest.raises(ValueError, match=r"not \.SUM = 5"):
        porting.status_of("communication", "ReduceOp.SUM", ".SUM = 5")
    with pytest.raises(AttributeError, match="telephone"):
        porting.status_of("communication", "telephone", "telephone(number)")


WORDS = {
    "contrib.sync_batchnorm": "torch.nn.SyncBatchNorm",
    "data_parallel.bagua_distributed": "model.with_bagua",
    "distributed.launch": "torchrun",
    "distributed.run": "torchrun",
    "model_parallel": "deepspeed.moe",
    "moe": "deepspeed.moe",
    "service": "BAGUA_DEFAULT_BUCKET_SIZE",
}


def test_each_module_that_is_left_out_has_a_test() -> None:
    assert WORDS.keys() == REPLACEMENTS.keys()


@pytest.mark.parametrize(("name", "word"), WORDS.items())
def test_importing_what_is_left_out_names_the_replacement(name: str, word: str) -> None:
    package, _, last = f"bagua_ref.{name}".rpartition(".")
    for statement in (
        f"import bagua_ref.{name}",
        f"from bagua_ref.{name} import Anything",
        f"from {package} import {last}",
    ):
        with pytest.raises(
            ImportError, match=rf"bagua_ref\.{name} is not provided; .*{word}"
        ) as raised:
            exec(statement)
        assert isinstance(raised.value, NotProvidedError)
        assert isinstance(raised.value, BaguaError)
    if "." not in name:
        assert not hasattr(bagua_ref, name)
        with pytest.raises(AttributeError, match=word):
            getattr(bagua_ref, name)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MISSING.items() for name in names]
)
def test_importing_a_name_that_is_left_out_says_what_to_use_instead(module: str, name: str) -> None:
    with pytest.raises(
        NotProvidedError,
        match=rf"^bagua_ref\.{module}\.{name} is not provided; .*(use|choose|ask|pass) ",
    ):
        exec(f"from bagua_ref.{module} import {name}")


@pytest.mark.parametrize("module", MISSING)
def test_a_misspelt_name_of_a_module_is_an_ordinary_error(module: str) -> None:
    found = importlib.import_module(f"bagua_ref.{module}")
    assert not hasattr(found, "get_autotune_leval")
    with pytest.raises(
        AttributeError, match=rf"module 'bagua_ref\.{module}' has no attribute 'sned'"
    ):
        found.sned  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", ["launch", "run"])
def test_the_old_launcher_names_torchrun(name: str) -> None:
    ended = run_script(
        f"import runpy; runpy.run_module('bagua_ref.distributed.{name}', run_name='__main__')"
    )
    assert ended.returncode == 1
    assert "use" not in ended.stdout
    assert "torchrun --nproc_per_node=4 train.py" in ended.stderr


def test_a_misspelt_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'bagua_ref' has no attribute 'with_bagau'"):
        bagua_ref.with_bagau  # noqa: B018
