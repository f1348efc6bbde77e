"""The tables of docs/porting.md, written from the code by ``python docs/_porting.py``. A test fails
if they are out of date.

Each name of Bagua 0.9 is looked up in the installed package and its parameters are compared.
Differences in behaviour cannot be read from the code; they are in CHANGED.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed

import bagua_ref
from bagua_ref.base.not_provided import MISSING, REPLACEMENTS
from bagua_ref.errors import NotProvidedError

sys.path.insert(0, str(Path(__file__).parent))
from _porting_names import NAMES

PAGE = Path(__file__).with_name("porting.md")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

WRAPPER = (
    "always a class; unsupported methods and arguments raise NotImplementedError, which names them"
)
CONSTRUCTOR = (
    f"{WRAPPER}. `optimizers=None` means no optimizers, `algorithm=None` means"
    " `GradientAllReduceAlgorithm()`"
)
ASYNC = "algorithms.async_model_average:AsyncModelAverageAlgorithmImpl"
EITHER_NAME = "takes the module by position, as `bagua_ddp=` or as `bagua_module=`"
CHANGED = {
    ":get_backend": (
        "returns kernels; for the communication of a wrapped module use `communication.get_backend`"
    ),
    "communication:get_backend": "takes names of wrapped modules only",
    "communication:BaguaProcessGroup": (
        "a node's leader is its lowest rank, so nodes may be uneven ([S1])"
    ),
    "communication:reduce_scatter_inplace": "leaves the other ranks' chunks unchanged ([S3.9])",
    "tensor:BaguaTensor.bagua_backend_tensor": (
        "returns an object that collectives accept in place of the effective tensor; it "
        "has `data_ptr()` and `num_elements()`, as Bagua's"
    ),
    "bucket:BaguaBucket": (
        "padding is zero before each execution ([S2.2]); repeated names, overlap, mixed dtypes or"
        " devices are errors ([S2.6])"
    ),
    "bucket:BaguaBucket.check_flatten": "adjacent tensors must also share one storage ([S2.3])",
    "bucket:BaguaBucket.append_centralized_synchronous_op": (
        "on uneven nodes, a hierarchical mean is that over all ranks "
        "([S3.3]); every bit of a compressed result is defined ([S3.7], [S4])"
    ),
    "bucket:BaguaBucket.append_decentralized_synchronous_op": (
        '"shift_one" with an odd number of ranks is refused at once ([S3.4])'
    ),
    "bucket:BaguaBucket.append_asynchronous_model_average_op": (
        "supports any floating-point dtype ([S3.6])"
    ),
    "distributed:BaguaModule.with_bagua": (
        "a parameter that a backward does not reach is an error, unless "
        "`find_unused_parameters=True` ([S2.5]); evaluation is not counted as training ([S5])"
    ),
    "data_parallel.functional:all_reduce": (
        "for a tensor that requires a gradient, operators other than SUM and AVG raise "
        "NotImplementedError"
    ),
    "data_parallel.distributed:DistributedDataParallel": CONSTRUCTOR,
    "data_parallel.distributed:DistributedDataParallel_V1_9_0": CONSTRUCTOR,
    "data_parallel.distributed:DistributedDataParallel_V1_9_0_Interface": WRAPPER,
    "algorithms.decentralized:LowPrecisionDecentralizedAlgorithm": (
        "the interval counts optimizer steps ([S5.4])"
    ),
    "algorithms.q_adam:QAdamOptimizer": (
        "each parameter uses the options of its own group; in the warm-up it equals the installed "
        "`torch.optim.Adam` bit for bit ([S5.5])"
    ),
    f"{ASYNC}.abort": f"holds until `resume`, also in the warm-up ([S5.6]); {EITHER_NAME}",
    f"{ASYNC}.resume": EITHER_NAME,
    "contrib.fuse.optimizer:fuse_optimizer": (
        "refuses optimizers that are not element-wise; "
        "storage offsets are honoured, and a 0-dim `step` works ([S6])"
    ),
    "contrib.load_balancing_data_loader:LoadBalancingDistributedSampler": (
        "never changes the dataset's complexities ([S7])"
    ),
    "contrib.load_balancing_data_loader:LoadBalancingDistributedBatchSampler": (
        "all replicas get as many batches ([S7.4])"
    ),
    "contrib.cache_loader:CacheLoader.get": (
        "a key whose text need not identify it is a TypeError ([S8.1]); a cached None is a hit "
        "([S8.2])"
    ),
    "contrib.cached_dataset:CachedDataset": (
        "samples are stored without pickle, and a failing store never stops "
        "training ([S8.3], [S8.5])"
    ),
    "contrib.utils.store:Store.shutdown": (
        "stops the server only in the process that started it ([S8.4])"
    ),
    "contrib.utils.redis_store:RedisStore": "one server per node and job, with a password ([S8.4])",
    "contrib.utils.redis_store:bootstrap_redis_server": (
        "returns the addresses and passwords of all nodes' servers ([S8.4])"
    ),
    "contrib.utils.redis_store:start_redis_server_cli": (
        "listens on loopback only, returns when the server answers, and raises if it does not start"
    ),
    "contrib.utils.redis_store:_RedisStore": (
        "connects at its first use, in each process separately"
    ),
}
"""Differences in behaviour, by ``module:name``. Clauses in brackets become links."""

_INTERFACE = "data_parallel.distributed:DistributedDataParallel_V1_9_0_Interface"
UNSUPPORTED = {
    f"{_INTERFACE}.{method}": f"raises NotImplementedError; {instead}"
    for method, instead in {
        "scatter": "start a process for each device",
        "gather": "start a process for each device",
        "to_kwargs": "`forward` moves inputs",
        "register_comm_hook": "pass `algorithm=`",
    }.items()
}
"""Methods that only raise NotImplementedError."""

INTERNAL = {"is_background", "job"}
"""Parameters for internal use, which the page does not list."""

Entry = tuple[str, str, str]
"""Name, status and remark."""


def table() -> str:
    """Return the Markdown between the two marks of the page."""
    parts = []
    for module, lines in NAMES.items():
        rows = [
            f"| `{name}` | {status} | {_linked(remark)} |"
            for name, status, remark in entries(module, lines)
        ]
        title = f"bagua.torch_api.{module}".rstrip(".")
        parts.append(
            "\n".join([f"### `{title}`", "", "| name | status | remark |", "|---|---|---|", *rows])
        )
    rows = [f"| `{name}` | not provided | {text} |" for name, text in REPLACEMENTS.items()]
    parts.append(
        "\n".join(
            [
                "### Modules that are left out",
                "",
                "| `bagua_ref.` | status | instead |",
                "|---|---|---|",
                *rows,
            ]
        )
    )
    return "\n\n".join(parts) + "\n"


def entries(module: str, lines: str) -> Iterator[Entry]:
    """Yield a row for each line of one module."""
    owner = ""
    for line in lines.split("\n"):
        line = line.strip()
        if not line:
            continue
        line = line.removeprefix("class ")
        if not line.startswith("."):
            owner = line.split("(")[0]
        name = (owner if line.startswith(".") else "") + line.split("(")[0].split(" = ")[0]
        yield name, *status_of(module, name, line)


def status_of(module: str, name: str, line: str) -> tuple[str, str]:
    """Return status and remark of ``name``, whose line of the list is ``line``.

    Raises:
        ValueError: its parameters are others, and CHANGED does not say how.
    """
    try:
        found: Any = importlib.import_module(f"bagua_ref.{module}".rstrip("."))
    except NotProvidedError:
        return "not provided", REPLACEMENTS[module]
    if instead := MISSING.get(module, {}).get(name.split(".")[0]) or (
        not module and REPLACEMENTS.get(name)
    ):
        return "not provided", instead
    for part in name.split("."):
        if part in vars(found).get("__annotations__", ()) and not hasattr(found, part):
            return "changed", "an attribute of wrapped modules only"
        inside, found = found, getattr(found, part)
    if instead := UNSUPPORTED.get(f"{module}:{name}"):
        return "not provided", instead
    note = CHANGED.get(f"{module}:{name}", "")
    added: list[str] = []
    if "(" in line:
        is_method = "." in name and not isinstance(
            inspect.getattr_static(inside, name.split(".")[-1]), (classmethod, staticmethod)
        )
        same, added = compare(line, found, is_method)
        if not same and not note:
            raise ValueError(
                f"bagua_ref.{module}.{name}{inspect.signature(found)} is not {line}: say how in"
                f" CHANGED of {__file__}"
            )
    elif " = " in line and found != int(line.split(" = ")[1]):
        raise ValueError(f"bagua_ref.{module}.{name} is {found!r}, not {line}")
    new = f"new: {', '.join(added)}" if added else ""
    return "changed" if note else "same", ". ".join(filter(None, (note, new)))


def compare(line: str, found: Any, is_method: bool) -> tuple[bool, list[str]]:
    """Return whether ``found`` takes the parameters of ``line`` with the same defaults, and what it
    takes in addition.
    """
    mine = list(inspect.signature(found).parameters.values())[1 if is_method else 0 :]
    theirs = _parameters(line[line.index("(") + 1 : line.rindex(")")])
    added = [
        p
        for p in mine
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.VAR_KEYWORD and f"**{p.name}" not in theirs)
    ]
    kept = [p for p in mine if p not in added]
    names = [{p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name for p in kept]  # type: ignore[call-overload]
    same = len(names) == len(theirs) and all(
        wanted.startswith("_") or (name == wanted and p.default == default)
        for name, p, (wanted, default) in zip(names, kept, theirs.items(), strict=True)
    )
    return same, [
        f"`{'**' if p.kind is p.VAR_KEYWORD else ''}{p.name}`"
        for p in added
        if p.name not in INTERNAL
    ]


def _parameters(text: str) -> dict[str, Any]:
    """Return names, with stars, and defaults of the parameters in ``text``."""
    arguments = ast.parse(f"lambda {text}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    world = {
        "ReduceOp": bagua_ref.ReduceOp,
        "dist": torch.distributed,
        **vars(bagua_ref.algorithms),
    }
    defaults = [eval(ast.unparse(node), world) for node in arguments.defaults]
    without = len(arguments.args) - len(defaults)
    found = dict(
        zip(
            [a.arg for a in arguments.args],
            [inspect.Parameter.empty] * without + defaults,
            strict=True,
        )
    )
    stars = {f"*{arguments.vararg.arg}": inspect.Parameter.empty} if arguments.vararg else {}
    return (
        found
        | stars
        | ({f"**{arguments.kwarg.arg}": inspect.Parameter.empty} if arguments.kwarg else {})
    )


def _linked(remark: str) -> str:
    """Turn ``[S2.5]`` into a link to the specification's clause, if the page has it."""
    specification = PAGE.with_name("spec.md").read_text()
    for clause in {word.split("]")[0] for word in remark.split("[S")[1:]}:
        anchor = f"s{clause.replace('.', '-')}"
        remark = remark.replace(
            f"[S{clause}]",
            (
                f"[S{clause}](spec.md#{anchor})"
                if f"{{ #{anchor} }}" in specification
                else f"S{clause}"
            ),
        )
    return remark


def page() -> str:
    """Return the whole page with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
