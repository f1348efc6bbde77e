"""Communication between ranks: one contract, implemented over torch.distributed and in
simulations.
"""
