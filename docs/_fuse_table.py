"""The table of docs/fuse.md, written by ``python docs/_fuse_table.py``. A test fails if it is out
of date.

For every class of torch.optim it has the verdict of fuse_optimizer, and the result of comparing
flattened with unflattened steps.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from bagua_ref.contrib.fuse.optimizer import fuse_optimizer, try_on_clones

PAGE = Path(__file__).with_name("fuse.md")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return all optimizers that the installed torch has."""
    found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {
        name: cls
        for name, cls in sorted(found.items())
        if issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
    }


def make(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return cls([torch.nn.Parameter(torch.zeros(3, 2))], lr=0.01)  # type: ignore[call-arg]


def row(name: str, cls: type[torch.optim.Optimizer]) -> str:
    try:
        fuse_optimizer(make(cls))
    except ValueError as error:
        verdict, reason = "refused", str(error).partition("cannot be fused: ")[2]
    else:
        verdict, reason = "fused", ""
    tried = "differs, or raises" if try_on_clones(make(cls)) else "equal in every bit"
    flags = [
        flag
        for flag in ("foreach", "fused", "capturable", "differentiable")
        if flag in inspect.signature(cls).parameters
    ]
    flags = flags if verdict == "fused" else []
    return (
        f"| `{name}` | {verdict} | {tried} | {', '.join(f'`{flag}`' for flag in flags)} |"
        f" {reason} |"
    )


def table() -> str:
    lines = ["| optimizer | verdict | tried on clones | flags | why not |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(row(name, cls) for name, cls in classes().items())])


def page() -> str:
    """Return the whole page with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
