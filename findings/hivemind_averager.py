"""hivemind's averager with three peers on this machine, beside the mean of what they give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from findings.common import DIFFERS, Row, judged

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance, assert_equal

PEER = "hivemind==1.1.12"
PEERS = 3
_BUSY = (torch.float32, 300_000)
"""More than one part of what a peer sends at once."""


def averaged(xs: list[torch.Tensor], compression: str) -> list[torch.Tensor]:
    """Return each peer's tensor after one step of averaging."""
    import hivemind

    chosen = getattr(hivemind.compression, compression)()
    sockets = set(_sockets())
    network: list[Any] = []
    averagers: list[Any] = []
    try:
        for x in xs:
            known = (
                {"initial_peers": [str(address) for address in network[0].get_visible_maddrs()]}
                if network
                else {}
            )
            network.append(hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], **known))
            averagers.append(
                hivemind.averaging.DecentralizedAverager(
                    [x.clone()],
                    network[-1],
                    prefix="findings",
                    target_group_size=len(xs),
                    min_matchmaking_time=15.0,
                    request_timeout=5.0,
                    compression=chosen,
                    start=True,
                )
            )
        for step in [averager.step(wait=False, timeout=60) for averager in averagers]:
            assert len(step.result() or ()) == len(xs), "no group of all peers was found"
        found = []
        for averager in averagers:
            with averager.get_tensors() as tensors:
                found.append(tensors[0].clone())
        return found
    finally:
        for part in (*averagers, *network):
            part.shutdown()
        for path in set(_sockets()) - sockets:  # of its daemons, which leave them there
            path.unlink(missing_ok=True)


def _sockets() -> Iterator[Path]:
    return Path("/tmp").glob("hivemind-*.sock")  # hivemind chooses the place


def given(dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(PEERS)
    ]


def mean_complaint(
    xs: list[torch.Tensor], found: list[torch.Tensor], tolerance: Tolerance
) -> str | None:
    """Return where a peer's tensor is not the mean."""
    wide = torch.stack(xs).double()
    for peer, x in enumerate(found):
        try:
            assert_equal(x, wide.mean(0).to(x.dtype), tolerance, magnitude=wide.abs().sum(0))
        except AssertionError as error:
            return f"peer {peer}: {error}"
    return None


def rounded_complaint(
    xs: list[torch.Tensor], found: list[torch.Tensor], step: torch.Tensor
) -> str | None:
    """Return where a peer's tensor is further from the mean than compression explains."""
    mean = torch.stack(xs).double().mean(0)
    for peer, x in enumerate(found):
        error = (x - mean).abs()
        if not bool((error <= step).all()):
            place = int((error - step).argmax())
            return (
                f"peer {peer}, element {place}: {x[place]} instead of {mean[place]} within"
                f" {step[place]}; it gave {xs[peer][place]}"
            )
    return None


def find() -> Iterator[Row]:
    name, words = (
        f"hivemind DecentralizedAverager ({PEER})",
        f"{PEERS} peers on one machine, " + "{:,} {} of N(0, 1)",
    )
    for dtype, size in (
        _BUSY,
        (torch.float16, 1000),
        (torch.bfloat16, 1000),
        (torch.float64, 1000),
    ):
        xs, kind = given(dtype, size), str(dtype).removeprefix("torch.")
        found = averaged(xs, "NoCompression")
        yield judged(
            name,
            "S3.1",
            f"{kind}, NoCompression",
            mean_complaint(xs, found, SUM(PEERS)),
            DIFFERS,
            why="Parts are added and sent in float32, whatever the tensors' dtype.",
            promise="Nothing is said of the dtype in which is averaged.",
            given=words.format(size, kind),
            effect="Means of float64 tensors have the precision of float32.",
        )
        if dtype is torch.float32:
            try:
                for x in found[1:]:
                    assert_equal(x, found[0], EXACT)
                complaint = None
            except AssertionError as error:
                complaint = str(error)
            yield judged(
                name,
                "S3.1",
                f"{kind}, NoCompression, all peers with the same bits",
                complaint,
                DIFFERS,
                why=(
                    "A peer is sent the difference between the mean and what it gave, and adds it:"
                    " each rounds in its own way."
                ),
                promise="Equal bits are not promised.",
                given=words.format(size, kind),
                effect=(
                    "Replicas differ in their last bits; averaging is to be repeated, not relied on"
                    " to keep them equal."
                ),
            )
    dtype, size = _BUSY
    xs = given(dtype, size)
    stacked = torch.stack(xs).double()
    # Three roundings to nearest: of what the peers send, in the mean and once more in the
    # difference to it, and of that difference.
    step = (
        2.0**-11
        * (
            stacked.abs().mean(0)
            + stacked.abs().amax(0)
            + (stacked - stacked.mean(0)).abs().amax(0)
        )
        + 1e-6
    )
    yield judged(
        name,
        "S3.1",
        "float32, Float16Compression, within three roundings to float16",
        rounded_complaint(xs, averaged(xs, "Float16Compression"), step),
        given=words.format(size, "float32"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for compression in ("Uniform8BitQuantization", "Quantile8BitQuantization"):
            # Levels of 6 standard deviations / 256; what lies beyond is cut off to 3 deviations.
            found = averaged(xs, compression)
            level = torch.full(
                (size,), 2 * 6 / 256 + 2 * max(0.0, float(stacked.abs().max()) - 3)
            ).double()
            complaint = rounded_complaint(xs, found, level)
            unchanged = all(torch.equal(x, mine) for x, mine in zip(found, xs, strict=True))
            yield judged(
                name,
                "S3.2",
                f"float32, {compression}, within two levels and what is cut off",
                complaint and f"{complaint}; all peers keep what they gave: {unchanged}",
                why=(
                    f"Decompression raises a TypeError with NumPy {numpy.__version__}, which"
                    " refuses int() of an array of one element. The exchange logs it and goes on"
                    " without the peer; every peer keeps its own tensor, and step() returns the"
                    " group as after a success."
                ),
                promise=(
                    "The package asks for numpy>=1.17, without an upper bound; compression is"
                    " described as a way to send less."
                ),
                given=words.format(size, "float32"),
                effect="Nothing is averaged, and nothing raises: each peer trains alone.",
            )
