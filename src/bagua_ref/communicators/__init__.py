"""How ranks reach each other: one contract, over torch.distributed or in a simulation."""
