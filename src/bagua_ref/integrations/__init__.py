"""Ways to use the algorithms from other libraries, one file each."""

from bagua_ref.integrations.ddp_hooks import DDPHookState, ddp_comm_hook

__all__ = ["DDPHookState", "ddp_comm_hook"]
