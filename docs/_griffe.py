"""A griffe extension: examples in docstrings become code blocks, and internals have no place on the
API's pages.

Markdown would read ``>>>`` as nested quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)

INTERNAL = re.compile(
    "|".join(
        rf"bagua_ref\.{name}"
        for name in (
            # What one algorithm overrides is described in the base class.
            r"algorithms\.(?!base)\w+\.(?!Async|DiLoCo)\w+Impl",
            r"algorithms\.(?!base)\w+\.\w+\.(reify|check)",
            r"algorithms\.diloco\.DiLoCoAlgorithmImpl\.(?!global_weights$|fragments$|outer_optimizers$)\w+",
            r"integrations\.ddp_hooks\.DDPHookState\.(?!state_dict$|load_state_dict$|reductions$|buckets$)\w+",
            r"algorithms\.async_model_average\.(State|AsyncModelAverageAlgorithmImpl\.(?!abort$|resume$)\w+)",
            r"algorithms\.\w+\.QAdamOptimizer\.(ensure_state|__setstate__)",
            r"communication\.BaguaProcessGroup\.(for_background|sibling|side_stream|refuse_in_child)",
            r"bucket\.BaguaBucket\.(running|kernels|stream|settle|copy_from_flat)",
            r"tensor\.(?!BaguaTensor)\w+",
            r"runtime\.(use_world|World\.(default_group|transport|engines|known_identity|was_in_job|peers))",
            r"launch_environment\.Identity\.from_environment",
            r"contrib\.utils\.redis_store\.checked_capacity",
            r"data_parallel\.joining\.Joining",
            r"data_parallel\.wrapping\.(wrap|context_of|resynchronize)",
            # Methods that only say what to use instead; docs/porting.md lists them.
            r"data_parallel\.distributed\.\w+\.(scatter|to_kwargs|gather|register_comm_hook)",
        )
    )
)


class Extension(griffe.Extension):
    """Fence examples that stand outside an ``Examples:`` section, and hide what users do not
    call.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring and "\nExamples:\n" not in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._prune(pkg)

    def _prune(self, owner: griffe.Module | griffe.Class) -> None:
        for name, member in list(owner.members.items()):
            if INTERNAL.fullmatch(
                member.target_path if isinstance(member, griffe.Alias) else member.path
            ):
                del owner.members[name]
            elif isinstance(member, griffe.Module | griffe.Class):
                self._prune(member)
