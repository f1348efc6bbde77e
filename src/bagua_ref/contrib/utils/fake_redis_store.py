"""The store of backend="fakeredis": as `RedisStore`, with Python servers inside the ranks (S8.4)."""

from __future__ import annotations

from bagua_ref.contrib.cache import job_servers
from bagua_ref.contrib.utils.redis_store import DEFAULT_CAPACITY, TIMEOUT, RedisStore, checked_capacity

__all__ = ["FakeRedisStore"]


class FakeRedisStore(RedisStore):
    """A fakeredis server in the first rank of each node, for laptops and tests. It never evicts, so it can use up the memory.

    Args:
        cluster_mode: True: keys are spread over all nodes (S8.1). False: each node uses only its own server.
        capacity_per_node: accepted, but not enforced.
        timeout: see `RedisStore`.

    Raises:
        BackendUnavailableError: fakeredis is not installed.
        NotInitializedError: there are several ranks and no process group yet.
    """

    def __init__(self, cluster_mode: bool = True, capacity_per_node: int = DEFAULT_CAPACITY, *, timeout: float = TIMEOUT) -> None:
        super().__init__(job_servers.addresses("fakeredis", checked_capacity(capacity_per_node), cluster_mode), timeout=timeout)
        self.cluster_mode = cluster_mode

    def shutdown(self) -> None:
        """Stop this node's server if it runs in this process; all loaders of the node lose it."""
        self.close()
        job_servers.shutdown("fakeredis")
