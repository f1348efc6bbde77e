"""Scripts about a cache loader and its stores, shared by all inputs of a check."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.lab.servers import ServerPool
from bagua_ref.conformance.lab.violation import Violation

__all__ = ["LOADER", "CacheScript", "cache_script"]

LOADER = ("CacheLoader",)
_pools: weakref.WeakKeyDictionary[Lab, ServerPool] = weakref.WeakKeyDictionary()


def _pool(lab: Lab) -> ServerPool:
    if lab not in _pools:
        _pools[lab] = ServerPool()
        lab.resources.callback(_pools[lab].close)
    return _pools[lab]


class CacheScript(Play):
    """A script about ``loader``, whose stores are ``servers``."""

    def __init__(self, lab: Lab, servers: int, *imports: str) -> None:
        super().__init__(lab, "cache", "from bagua_ref.conformance.lab.servers import start_servers", *imports)
        self.names["start_servers"] = _pool(lab).start_servers
        self.do(f"servers = start_servers({servers})\nhosts = [server.host for server in servers]")

    def loader(self, name: str = "data", size: int = 1, variable: str = "loader", more: str = "") -> None:
        """Make a loader."""
        arguments = f"hosts=hosts, dataset_name={name!r}, writer_buffer_size={size}{more}"
        self.do(f"{variable} = cache.CacheLoader(backend='redis', {arguments})")


@contextlib.contextmanager
def cache_script(lab: Lab, servers: int = 1, values: str = "Source") -> Iterator[CacheScript]:
    """Give a script, and end what it leaves behind, as the next one has the same servers."""
    script = CacheScript(lab, servers, f"from bagua_ref.conformance.inputs.cache_values import {values}")
    try:
        yield script
    except Violation as violation:
        if died := [place for place, server in enumerate(script.names.get("servers", ())) if server.has_died()]:
            raise Violation(
                f"{violation}; meanwhile, store {died[0]}, a server of the check, had died", violation.snippet
            ) from violation.__cause__
        raise
    finally:
        for name, left in script.names.items():
            if hasattr(left, "num_keys"):
                with contextlib.suppress(Exception), lab.journal.call(("close", f"{script.script}{name}.close()")):
                    left.close()
