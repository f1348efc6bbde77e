"""Tests of the page for users of Bagua: a name on it is there, or importing it says what to use."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
from tests.launch import run_script
from tests.scripts import ROOT

import bagua_ref
from bagua_ref.base.not_provided import MISSING, REPLACEMENTS
from bagua_ref.errors import BaguaError, NotProvidedError

SECTION = re.compile(r"^### `bagua\.torch_api\.?([\w.]*)`\n(.*?)(?=^###)", re.MULTILINE | re.DOTALL)
SAME = re.compile(r"^Same: (.*?)\.$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`[^|]*`) \| (changed|not provided) \| (.+) \|$", re.MULTILINE)


def names() -> list[tuple[str, str, str, str]]:
    """Return module, name, status and remark of every name on the page."""
    found = []
    for module, text in SECTION.findall((ROOT / "docs/porting.md").read_text()):
        rows = [(part, "same", "") for part in SAME.findall(text)] + ROW.findall(text)
        for part, status, remark in rows:
            found += [(module, name, status, remark) for name in re.findall("`([^`]+)`", part)]
    return found


def look_up(module: str, name: str) -> Any:
    """Return what a script gets that imports the first part of ``name`` from ``module``."""
    first, *rest = name.split(".")
    scope: dict[str, Any] = {}
    exec(f"from bagua_ref{'.' * bool(module)}{module} import {first} as found", scope)
    found = scope["found"]
    for part in rest:
        found = getattr(found, part)
    return found


def test_every_name_that_is_kept_can_be_imported_and_no_other() -> None:
    found = names()
    assert len(found) == len({name[:2] for name in found}) == 346
    for module, name, status, remark in found:
        if status == "not provided" and not remark.startswith("raises NotImplementedError"):
            with pytest.raises(ImportError):
                look_up(module, name)
        elif remark.startswith("an attribute of wrapped modules"):
            owner, _, attribute = name.rpartition(".")
            assert attribute in look_up(module, owner).__annotations__
        else:
            look_up(module, name)


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
    found = import_module(f"bagua_ref.{module}")
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
