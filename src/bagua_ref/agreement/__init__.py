"""Agreement between the ranks that train one module about what they do next: the only place that compares ranks during training.

Before each round of communication, every rank says what it is about to do (`Fact`), and `Agreement.check` compares.
"""

from bagua_ref.agreement.comparison import Agreement
from bagua_ref.agreement.facts import Fact, describe_differences

__all__ = ["Agreement", "Fact", "describe_differences"]
