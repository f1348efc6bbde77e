"""A mkdocs hook: clauses that pages and docstrings name, as in S5.1, link to the specification."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

SPEC = "spec.md"
ANCHORS = set(
    re.findall(r"\{ #(s[\d-]+) \}", Path(__file__).with_name(SPEC).read_text(encoding="utf-8"))
)
_CLAUSE = re.compile(r"\bS\d+(?:\.\d+)?\b(?!\.?\d)")
_TAG = re.compile(r"(<[^>]*>)")
_AS_IT_IS = ("a", "code", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "script", "style", "svg")
"""Elements in which nothing is linked."""


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Return the page with its links."""
    return (
        html
        if page.file.src_uri == SPEC
        else linked(html, get_relative_url(files.get_file_from_path(SPEC).url, page.url))
    )


def linked(html: str, spec: str) -> str:
    """Return the HTML with links to clauses of the specification at ``spec``."""

    def link(found: re.Match[str]) -> str:
        anchor = found[0].lower().replace(".", "-")
        return f'<a href="{spec}#{anchor}">{found[0]}</a>' if anchor in ANCHORS else found[0]

    depth, parts = 0, []
    for part in _TAG.split(html):
        name = re.match(r"</?(\w+)", part)
        if name is None:
            parts.append(part if depth else _CLAUSE.sub(link, part))
            continue
        if name[1] in _AS_IT_IS and not part.endswith("/>"):
            depth += -1 if part.startswith("</") else 1
        parts.append(part)
    return "".join(parts)
