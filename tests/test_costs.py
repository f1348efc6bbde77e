"""Costs of S14: values computed by hand, and texts of links and times. The properties are in
property_tests/test_costs.py.
"""

from __future__ import annotations

import pytest

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import LinkCost, LinkCosts, Traffic, parse_seconds

LINKS = LinkCosts(LinkCost(1.0, 0.25), LinkCost(0.5, 0.125))


def test_S14_1_the_messages_of_three_ranks_are_those_worked_out_by_hand() -> None:
    chunks = costs.chunk_bytes(4, 2, 3)
    assert chunks == [2, 2, 4]
    assert costs.reduce_scatter(chunks) == [
        [(0, 1, 4), (1, 2, 2), (2, 0, 2)],
        [(0, 1, 2), (1, 2, 4), (2, 0, 2)],
    ]
    assert costs.all_gather(chunks) == [
        [(0, 1, 2), (1, 2, 2), (2, 0, 4)],
        [(0, 1, 4), (1, 2, 2), (2, 0, 2)],
    ]
    assert costs.broadcast(8, 5, root=3) == [[(3, 4, 8)], [(3, 0, 8), (4, 1, 8)], [(3, 2, 8)]]
    assert costs.reduce(8, 5, root=3) == [[(2, 3, 8)], [(0, 3, 8), (1, 4, 8)], [(4, 3, 8)]]
    assert costs.gather([3, 4, 5], root=1) == [[(0, 1, 3), (2, 1, 5)]]
    assert costs.scatter([3, 4, 5], root=1) == [[(1, 0, 3), (1, 2, 5)]]
    assert costs.all_to_all([[0, 1], [2, 0]]) == [[(0, 1, 1), (1, 0, 2)]]
    assert costs.one_round([(0, 0, 9), (0, 1, 3)]) == [[(0, 1, 3)]]


def test_S14_1_counts_and_times_on_two_nodes_are_those_worked_out_by_hand() -> None:
    all_reduce, node_of = costs.all_reduce([8, 8, 8, 8]), [0, 0, 1, 1]
    inside, between = Traffic(48, 6, 0, 0), Traffic(0, 0, 48, 6)
    assert costs.traffic(all_reduce, node_of)[0] == {"inside": inside, "between": between}
    assert costs.operation_seconds(all_reduce, node_of, LINKS) == 6 * (1.0 + 8 * 0.25)
    assert costs.operation_seconds(all_reduce, [0] * 4, LINKS) == 6 * (0.5 + 8 * 0.125)
    # Round 2 of an all-to-all crosses with both ranks of a node at once.
    assert (
        costs.operation_seconds(costs.all_to_all([[8] * 4] * 4), node_of, LINKS)
        == 3.0 + (1.0 + 16 * 0.25) + 3.0
    )


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("1Gbit,20ms", LinkCosts(LinkCost(0.02, 8e-9), LinkCost(0.02, 8e-9))),
        ("2.5MB/s,0s", LinkCosts(LinkCost(0.0, 4e-7), LinkCost(0.0, 4e-7))),
        ("10kbit,1s,8e3B,2us", LinkCosts(LinkCost(1.0, 8e-4), LinkCost(2e-6, 1.25e-4))),
    ],
)
def test_a_link_is_read(text: str, links: LinkCosts) -> None:
    assert LinkCosts.parse(text) == links


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1Gbit", "link='1Gbit' must be BANDWIDTH,LATENCY such as 1Gbit,20ms"),
        ("1Gbit,1ms,1Gbit", "must be BANDWIDTH,LATENCY"),
        ("fast,20ms", "bandwidth 'fast' must be a number above 0 of bit or B a second"),
        ("1Gx,20ms", "bandwidth '1Gx' must be"),
        ("0Gbit,20ms", "bandwidth '0Gbit' must be"),
        ("nanbit,20ms", "bandwidth 'nanbit' must be"),
        ("-1Gbit,20ms", "bandwidth '-1Gbit' must be"),
        ("1e999bit,20ms", "bandwidth '1e999bit' must be"),
        ("1Gbit,20", "time '20' must be a number of s, ms or us, such as 20ms"),
        ("1Gbit,-1ms", "time '-1ms' must be"),
        ("1Gbit,2h", "time '2h' must be"),
    ],
)
def test_what_is_no_link_is_refused_with_what_is_allowed(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="must be") as raised:
        LinkCosts.parse(text)
    assert told in str(raised.value)


def test_a_time_is_read_and_zero_only_where_it_may_be() -> None:
    assert [parse_seconds(text) for text in ("120ms", "5us", "1.5s")] == [0.12, 5e-6, 1.5]
    assert parse_seconds("0ms", 0.0) == 0.0
    with pytest.raises(ValueError, match="time '0ms' must be a number above 0 of s, ms or us"):
        parse_seconds("0ms")
