"""Functions of `expected` with a fault: the reference, which is right, fails a check of the clause.

This shows that a check compares with its own calculation, and not the target with itself.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.wrong_objects import Whole, assert_found

from bagua_ref.conformance.expected import (
    algorithms_numpy,
    collectives_plain,
    compression_numpy,
    kernels_numpy,
    samplers_plain,
)

FAULTS = [
    (kernels_numpy, "average", lambda dtype, x, y: x, "kernels.S3.4.average"),
    (
        kernels_numpy,
        "order_by_complexity",
        lambda keys: np.arange(len(keys)),
        "kernels.S7.2.order_by_complexity",
    ),
    (collectives_plain, "broadcast", lambda x, root: x, "collectives.S3.9.broadcast"),
    (collectives_plain, "alltoall", lambda x: x, "collectives.S3.9.alltoall"),
    (
        samplers_plain,
        "num_samples",
        lambda length, replicas, drop_last: length // replicas,
        "samplers.S7.1.lengths",
    ),
    (algorithms_numpy, "step_of_sgd", lambda x, grad, lr, dtype: x, "algorithms.S5.1.gradients"),
    (
        algorithms_numpy,
        "low_precision",
        lambda ranks, dtype, average: ranks[0],
        "comm_ops.S3.2.low_precision",
    ),
    (compression_numpy, "sent_count", lambda m, ratio: m, "algorithms.S11.2.count"),
]


@pytest.mark.proof
@pytest.mark.parametrize(("module", "name", "wrong", "check"), FAULTS, ids=[f[1] for f in FAULTS])
def test_the_reference_fails_where_what_is_expected_is_wrong(
    module, name, wrong, check, monkeypatch
):
    monkeypatch.setattr(module, name, wrong)
    assert_found(Whole(), check)
