"""Rounds of communication that begin only if all ranks agree: the only place that compares ranks during training."""

from bagua_ref.rounds.agreed_rounds import AgreedRound, AgreedRounds
from bagua_ref.rounds.agreement import UNSAID, Agreement, Comparison, Fact, describe_differences

__all__ = ["UNSAID", "AgreedRound", "AgreedRounds", "Agreement", "Comparison", "Fact", "describe_differences"]
