"""Parameters that messages advise exist where the reader can pass them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "bagua_ref"
CALL = re.compile(r"\b(?:call|use|or|by) ((?:[a-z_]+\.)*[A-Za-z_]+)\((?:[^()=]*, )?([a-z_]+)=")
"""A call with a parameter, after such a verb or preposition."""
ALONE = re.compile(
    r"\b(?:pass|use|call|with|needs?|set|or) (?:[a-z]+ as )?([a-z_]+)=(?=[A-Z\[\s'\d,.;]|$)"
)
"""A parameter without its function."""

WRAPPING = (
    "distributed.BaguaModule.with_bagua",
    "data_parallel.DistributedDataParallel",
    "integrations.transformers.use_bagua",
    "integrations.lightning_parts._Part",
)
CACHING = ("contrib.cache_loader.CacheLoader", "contrib.utils.redis_store.RedisStore")
BALANCING = ("contrib.load_balancing_sampler.LoadBalancingDistributedSampler",)
CALLABLES = {
    "algorithm": ("data_parallel.DistributedDataParallel",),
    "allow_pickle": CACHING[:1],
    "backend": CACHING[:1],
    "comm": ("groups.communication.allreduce_inplace",),
    "complexities": BALANCING,
    "complexity_fn": BALANCING,
    "do_flatten": WRAPPING[:1],
    "drop_last": ("contrib.budget_batch_sampler.BudgetBatchSampler",),
    "elementwise": ("contrib.fuse.fuse_optimizer",),
    "find_unused_parameters": WRAPPING,
    "flatten": ("buckets.bucket.BaguaBucket",),
    "hosts": CACHING[1:],
    "hierarchical": (
        "algorithms.ByteGradAlgorithm",
        "algorithms.DecentralizedAlgorithm",
        "algorithms.LocalSGDAlgorithm",
    ),
    "scattergather": ("buckets.bucket.BaguaBucket.append_centralized_synchronous_op",),
    "shuffle": BALANCING,
}
"""Public callables through which a reader of a message with this parameter has come; each must have
it.
"""
OTHERS = {"sparse", "error_feedback", "grad_scaler", "what"}
"""Of torch's modules, and options that a message is about rather than for."""
FOREIGN = {"redis", "torch", "fully_shard", "Trainer"}
LOCAL = {
    "load_state_dict": "algorithms.base.AlgorithmImpl.load_state_dict",
    "join": "join",
    "SimulatedWorld": "simulation.SimulatedWorld",
}


def messages(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the strings of a source that are no docstrings, with their lines; values of f-strings
    as {}.
    """
    tree = ast.parse(path.read_text())
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
            yield path.name, node.lineno, text
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
            and " " in node.value
        ):
            yield path.name, node.lineno, node.value


def resolve(name: str) -> Any:
    """Return the object of this name in the package."""
    found: Any = importlib.import_module("bagua_ref")
    for part in name.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def takes(function: str, parameter: str) -> bool:
    if function.startswith("integrations."):  # needs a trainer's package to be imported
        return parameter in parameters_in_source(function)
    return parameter in inspect.signature(resolve(function)).parameters


def parameters_in_source(function: str) -> set[str]:
    """Return the parameters of a function, or of a class's __init__, as its source has them."""
    module, name = function.rsplit(".", 1)
    body = ast.parse(SOURCE.joinpath(*module.split(".")).with_suffix(".py").read_text()).body
    (found,) = (
        node
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    )
    if isinstance(found, ast.ClassDef):
        (found,) = (
            node
            for node in found.body
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        )
    assert isinstance(found, ast.FunctionDef)
    return {argument.arg for argument in found.args.args + found.args.kwonlyargs}


def complaints(text: str) -> list[str]:
    """Return what is wrong with the advice in a message."""
    wrong = []
    for function, parameter in CALL.findall(text):
        function = LOCAL.get(function, function.removeprefix("bagua_ref."))
        if function.split(".")[0] not in FOREIGN and not takes(function, parameter):
            wrong.append(f"{function}() takes no {parameter}")
    for parameter in ALONE.findall(text):
        if parameter not in CALLABLES and parameter not in OTHERS:
            wrong.append(f"{parameter}= belongs to no function: name it, or list it in CALLABLES")
        wrong += [
            f"{function}() takes no {parameter}"
            for function in CALLABLES.get(parameter, ())
            if not takes(function, parameter)
        ]
    return wrong


def test_parameters_that_messages_advise_exist_where_they_can_be_passed() -> None:
    found = [entry for path in sorted(SOURCE.rglob("*.py")) for entry in messages(path)]
    advised = {parameter for *_, text in found for parameter in ALONE.findall(text)}
    assert [(*where, wrong) for *where, text in found for wrong in complaints(text)] == []
    assert CALLABLES.keys() - advised == set(), "no message advises these any more"


def test_advice_that_cannot_be_followed_is_found() -> None:
    assert complaints("Load it with 4 ranks, or pass drop_rank_state=True to continue") != []
    assert complaints("call bagua_ref.checkpoint.load(..., drop_rank_states=True)") == [
        "checkpoint.load() takes no drop_rank_states"
    ]
    assert complaints("call bagua_ref.checkpoint.load(..., drop_rank_state=True)") == []
    assert complaints("unused in a step, pass find_unused_parameters=True, or freeze them") == []
