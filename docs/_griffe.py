"""A griffe extension: examples in docstrings become code blocks (Markdown would read ``>>>`` as nested quotations)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Fence every example that stands outside an ``Examples:`` section."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring and "\nExamples:\n" not in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
