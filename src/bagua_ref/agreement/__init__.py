"""Agreement between the ranks that train one module about what they do next: the only place that compares ranks during training.

When a round of communication begins, every rank says what it is about to do (`Fact`), and a `Comparison` is made.
"""

from bagua_ref.agreement.comparison import Agreement, Comparison
from bagua_ref.agreement.facts import UNSAID, Fact, describe_differences

__all__ = ["UNSAID", "Agreement", "Comparison", "Fact", "describe_differences"]
