"""Tests of the page for users of Bagua: a name on it is there, or importing it says what to use."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
from tests.scripts import ROOT

import bagua_ref
from bagua_ref.base.not_provided import NOT_PROVIDED
from bagua_ref.errors import NotProvidedError

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
        if status == "not provided" and not remark.startswith("raises NotProvidedError"):
            with pytest.raises(ImportError):
                look_up(module, name)
        elif remark.startswith("an attribute of wrapped modules"):
            owner, _, attribute = name.rpartition(".")
            assert attribute in look_up(module, owner).__annotations__
        else:
            look_up(module, name)


@pytest.mark.parametrize("name", NOT_PROVIDED)
def test_importing_a_name_that_is_left_out_says_what_to_use_instead(name: str) -> None:
    package, _, last = f"bagua_ref.{name}".rpartition(".")
    words = r"(use|choose|ask|pass|start) "
    with pytest.raises(NotProvidedError, match=rf"^bagua_ref\.{name} is not provided; .*{words}"):
        exec(f"from {package} import {last}")


@pytest.mark.parametrize(
    "module", sorted({name.rpartition(".")[0] for name in NOT_PROVIDED} - {""})
)
def test_a_misspelt_name_of_a_module_is_an_ordinary_error(module: str) -> None:
    found = import_module(f"bagua_ref.{module}")
    assert not hasattr(found, "get_autotune_leval")
    with pytest.raises(
        AttributeError, match=rf"module 'bagua_ref\.{module}' has no attribute 'sned'"
    ):
        found.sned  # noqa: B018


def test_a_misspelt_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'bagua_ref' has no attribute 'with_bagau'"):
        bagua_ref.with_bagau  # noqa: B018
