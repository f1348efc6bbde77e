"""Tests of the documentation: its examples, figures and generated parts, and the files that are
published.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import run_script
from tests.scripts import ROOT, load_script

from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua_ref.formulas.graphs import MODES
from bagua_ref.planning import plan_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)

MARK = "<<< end of block >>>"


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Return the page's Python blocks, each with the text block that directly follows it, if one
    does.
    """
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


def with_python() -> list[Any]:
    """Return the pages with Python; those that run checks in workers are left to the proofs."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.proof] if "run_conformance(" in page.read_text() else [],
        )
        for page in PAGES
        if blocks(page)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", with_python())
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: Path) -> None:
    found = blocks(page)
    script = f"\nprint({MARK!r})\n".join(code for code, _ in found)
    run = run_script(script)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(f"{MARK}\n")
    assert len(printed) == len(found)
    for (code, expected), actual in zip(found, printed, strict=True):
        assert expected is None or actual == expected, f"after\n{code}"


def test_the_pages_are_short() -> None:
    """All words count, also those of code; tables of results and checks are filled in by the build."""
    readme, *words = (len(page.read_text().split()) for page in PAGES)
    assert readme <= 600, "sources of figures included"
    assert len((ROOT / "docs/spec.md").read_text().split()) <= 11_770
    assert sum(words) <= 54_560


def test_the_guide_to_the_code_names_what_is_in_the_files() -> None:
    page = (ROOT / "docs/reading.md").read_text()
    files = [ROOT / "src/bagua_ref" / name for name in re.findall(r"`(\w+/\w+\.py)`", page)]
    assert len(files) > 15
    source = "".join(path.read_text() for path in files)
    for name in re.findall(r"`(?:\w+\.)?([A-Za-z_]+)`", page):
        assert re.search(rf"\b{name}\b", source), name


SECTIONS = [
    "Example",
    "Formula",
    "Message pattern",
    "Bytes sent",
    "Memory",
    "When to use it",
    "Options",
]
TRAFFIC = [
    ("gradient_allreduce", {}),
    ("bytegrad", {"hierarchical": False}),
    ("decentralized", {"hierarchical": False}),
    *(
        ("decentralized", {"hierarchical": False, "peer_selection_mode": mode})
        for mode in MODES
        if mode != "all"
    ),
    ("low_precision_decentralized", {"hierarchical": False}),
    ("qadam", {"hierarchical": False}),
    ("async", {"sync_interval_ms": 30}),
    ("local_sgd", {"period": 2}),
    ("diloco", {"period": 2}),
    ("diloco", {"period": 2, "compression": "MinMaxUInt8"}),
    ("powersgd", {"warmup_steps": 0}),
    ("powersgd", {"warmup_steps": 0, "matrix_approximation_rank": 4}),
    ("topk", {}),
    ("demo", {}),
    ("diloco", {"period": 2, "top_k": 64, "compression": "Stat2"}),
]


@pytest.mark.parametrize("name", sorted({name for name, _ in TRAFFIC}))
def test_every_algorithm_has_the_same_sections_and_a_picture_of_its_messages(name: str) -> None:
    page = (ROOT / f"docs/algorithms/{name}.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE)[: len(SECTIONS)] == SECTIONS
    assert "](https://arxiv.org/abs/" in page.split("## Example")[0], "it names its paper"
    assert f"](../images/pattern-{name}" in page.split("## Message pattern")[1].split("\n## ")[0]


@functools.cache
def bytes_per_step(case: int) -> float:
    """Return what each of four ranks sends per step of ResNet-50, or per round: S14.1's plan."""
    name, options = TRAFFIC[case]
    shapes = load_script("benchmarks/shapes.py").resnet50()
    module = torch.nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes)
    if name == "qadam":
        options = {**options, "q_adam_optimizer": QAdamOptimizer(module.parameters())}
    plan = plan_of(Algorithm.init(name, **options), module, (1,) * 4, 2**40)
    steps = range(plan.warmup + 1, plan.warmup + len(plan.cycle) + 1)
    return max(plan.traffic(step)[0]["between"].bytes_sent for step in steps)


@pytest.mark.parametrize("case", range(len(TRAFFIC)), ids=lambda case: f"{case}-{TRAFFIC[case][0]}")
def test_a_page_says_how_much_is_sent(case: int) -> None:
    name = TRAFFIC[case][0]
    megabytes = f"{bytes_per_step(case) / 1e6:.1f} MB"
    assert f"**{megabytes}**" in (ROOT / f"docs/algorithms/{name}.md").read_text()
    rows = re.findall(
        rf"^\| \[`{name}`\].*$", (ROOT / "docs/algorithms/index.md").read_text(), re.MULTILINE
    )
    assert any(f"| {megabytes}" in row for row in rows)


def test_every_size_on_a_page_of_algorithms_is_computed() -> None:
    sizes = set(map(bytes_per_step, range(len(TRAFFIC))))
    known = {f"{size / period / 1e6:.1f}" for size in sizes for period in (1, 8, 500)}
    for page in sorted((ROOT / "docs/algorithms").glob("*.md")):
        assert set(re.findall(r"([\d.,]+) MB\b", page.read_text())) <= known, page


def test_a_link_to_the_outside_is_on_the_list() -> None:
    script = load_script("docs/_links.py")
    assert script.LIST.read_text().split() == script.addresses(), (
        "look at what is new, then run: python docs/_links.py"
    )


def test_clauses_link_to_the_specification_but_in_code_and_links() -> None:
    pytest.importorskip("mkdocs")
    linked = load_script("docs/_clauses.py").linked
    assert (
        linked("<p>(S5.1), S99.1</p>", "../spec.html")
        == '<p>(<a href="../spec.html#s5-1">S5.1</a>), S99.1</p>'
    )
    for left in (
        "<code>S5.1</code>",
        '<a href="x">S5.1</a>',
        "<h2>S5.1</h2>",
        "<p>algorithms.S5.1.1</p>",
    ):
        assert linked(left, "spec.html") == left


def registered() -> set[str]:
    """Return the algorithms of the package; the registry here may hold those of other tests, too."""
    return {
        name
        for name, (algorithm, _) in GlobalAlgorithmRegistry.items()
        if algorithm.__module__.startswith("bagua_ref.")
    }


def test_the_readme_links_to_every_registered_algorithm_and_no_other() -> None:
    linked = re.findall(r"\[`\w+`\]\(\S+/algorithms/(\w+)\.md\)", (ROOT / "README.md").read_text())
    assert set(linked) == registered()
    specified = (ROOT / "docs/spec.md").read_text().split("In the registry:")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", specified)) == registered()


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    """Return the published files by path, as mkdocs and the hook collect them."""
    pytest.importorskip("mkdocstrings")
    from mkdocs.config import load_config
    from mkdocs.structure.files import get_files

    config = load_config(str(ROOT / "mkdocs.yml"))
    files = config.plugins.on_files(get_files(config), config=config)
    return {file.src_uri: file for file in files if file.inclusion.is_included()}


def documented(site: dict[str, Any]) -> list[str]:
    """Return the modules documented on the API pages."""
    pages = [file.content_string for path, file in site.items() if path.startswith("api/")]
    return [module for page in pages for module in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def test_the_site_publishes_pages_and_pictures_only(site: dict[str, Any]) -> None:
    assert {
        "index.md",
        "algorithms/bytegrad.md",
        "images/graph.png",
        "stylesheets/extra.css",
        "javascripts/filter.js",
    } <= site.keys()
    assert {Path(path).suffix for path in site} == {".md", ".svg", ".png", ".css", ".js"}


@pytest.mark.parametrize(
    "package", ["bagua_ref", "bagua_ref.algorithms", "bagua_ref.contrib", "bagua_ref.data_parallel"]
)
def test_the_api_pages_have_every_function_and_class_that_a_package_exports(
    package: str, site: dict[str, Any]
) -> None:
    shown = {
        name for module in documented(site) for name in importlib.import_module(module).__all__
    }
    found = importlib.import_module(package)
    assert {name for name in found.__all__ if callable(getattr(found, name))} <= shown


def test_the_api_pages_leave_out_what_only_the_package_itself_imports(site: dict[str, Any]) -> None:
    modules = documented(site)
    conformance = [module for module in modules if module.startswith("bagua_ref.conformance")]
    assert sorted(conformance) == [
        "bagua_ref.conformance",
        "bagua_ref.conformance.vectors",
    ]
    assert not [
        module for module in modules if module.startswith(("bagua_ref.scheduling", "bagua_ref.cli"))
    ]


@pytest.mark.proof
def test_the_api_pages_leave_out_what_users_do_not_call() -> None:
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "_griffe.py"))
    package = griffe.load("bagua_ref", search_paths=[ROOT / "src"], extensions=extensions)
    assert {"AlgorithmImpl", "Algorithm"} <= package["algorithms.base"].members.keys()
    assert package["algorithms.bytegrad"].members.keys() & {
        "ByteGradAlgorithm",
        "ByteGradAlgorithmImpl",
    } == {"ByteGradAlgorithm"}
    assert "scatter" not in package["data_parallel.distributed.DistributedDataParallel"].members
    assert package["data_parallel.joining"].members.keys() & {"Joining", "join"} == {"join"}
