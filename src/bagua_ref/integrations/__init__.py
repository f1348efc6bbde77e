"""Integrations with other libraries, one module each."""

from bagua_ref.integrations.ddp_hooks import DDPHookState, ddp_comm_hook

__all__ = ["DDPHookState", "ddp_comm_hook"]
