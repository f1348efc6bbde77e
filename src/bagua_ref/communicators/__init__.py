"""Communication between ranks: one contract, over torch.distributed or in a simulation."""
