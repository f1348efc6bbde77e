"""Mean over all ranks of low-rank approximations, with error feedback (S10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.base.memory import Layout
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.formulas.low_rank import orthonormalize, starting_columns
from bagua_ref.observe.meter import codec_phase
from bagua_ref.types import ReduceOp


@dataclass(frozen=True)
class Matrix:
    """Position of a compressed gradient in its bucket's flat tensor, as an n x m matrix in the
    row-major order of the gradient's axes.

    Attributes:
        name: name of the parameter, under which residual e and factor Q are stored.
        start: index of the first element.
        n: number of rows.
        m: number of columns.
        r: rank of the approximation.
        place: index i of the parameter, which determines its random columns.
        layout: the order of the gradient's elements in the flat tensor.
    """

    name: str
    start: int
    n: int
    m: int
    r: int
    place: int
    layout: Layout

    @property
    def end(self) -> int:
        """Index of the element after the matrix."""
        return self.start + self.n * self.m

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix in ``flat``: a view if strides can express it, else a copy."""
        return self.layout.view(flat[self.start : self.end]).reshape(self.n, self.m)

    def put_back(self, matrix: Tensor, flat: Tensor) -> None:
        """Copy a matrix returned by `of` back into ``flat``, unless it is a view."""
        part = flat[self.start : self.end]
        if matrix.data_ptr() != part.data_ptr():
            self.layout.view(part).copy_(matrix.view(self.layout.shape))


class LowRank(CommOp):
    """``x <- P Q^T`` for the matrices in x, with P and Q summed over ranks; the exact mean for all
    other elements (S10.2 to S10.5).

    M = gradient + e -> all-reduce P = M Q, and uncompressed gradients -> orthonormalize P ->
    all-reduce Q = M^T P

    Each rank sends ``2 (n-1)/n`` times the bytes of P, Q and uncompressed gradients, in float32
    (float64 for float64). Scratch is P, Q, the uncompressed gradients, and a float32 copy of x for
    16-bit dtypes. While ``round_number()`` is None, it is an all-reduce.

    Args:
        comm: the communicator of all ranks.
        kernels: the kernel backend.
        matrices: the compressed matrices in x, in order.
        factors: Q of the last round by name, m x r; changed in place.
        errors: residuals e by name, n x m; changed in place. Empty without memory.
        memory: the error to keep: of this rank's own approximation ("local"), of the mean
            ("averaged"), or None.
        seed: seed of the random columns.
        warm_start: start from the last round's Q, not from random columns.
        round_number: returns the number of compressed rounds before this one; None in uncompressed
            rounds.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019 (arXiv:1905.13727).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        matrices: Sequence[Matrix],
        factors: Mapping[str, Tensor],
        errors: Mapping[str, Tensor],
        *,
        memory: Literal["local", "averaged"] | None,
        seed: int,
        warm_start: bool,
        round_number: Callable[[], int | None],
    ) -> None:
        super().__init__(comm, kernels)
        self.matrices, self._factors, self._errors = matrices, factors, errors
        self._memory, self._seed = memory, seed
        self._warm_start, self._round_number = warm_start, round_number

    def work(self) -> tuple[str, int]:
        """Return the number of multiplications in the three products per matrix; 0 in uncompressed
        rounds.
        """
        compresses = self._round_number() is not None
        return "powersgd", 3 * sum(a.n * a.m * a.r for a in self.matrices) * compresses

    @torch.no_grad()
    def __call__(self, x: Tensor) -> None:
        """Replace ``x`` with the approximate mean over ranks."""
        number = self._round_number()
        if number is None or not self.matrices:
            self.comm.allreduce_inplace(x, ReduceOp.AVG)
            return
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        gradients = [a.of(wide) for a in self.matrices]
        if self._memory is not None:
            torch._foreach_add_(gradients, [self._errors[a.name] for a in self.matrices])
        kept = [self._factors[a.name] for a in self.matrices]
        if not self._warm_start:
            kept = [torch.zeros_like(factor) for factor in kept]
        queries = starting_columns(kept, self._seed, number, [a.place for a in self.matrices])

        left, usable = self._sum_left_factors(wide, gradients, queries)
        with codec_phase("compress"):
            orthonormalize(left)
            right_flat, right = _matrices(wide, [(a.m, a.r) for a in self.matrices])
            for gradient, p, q in zip(gradients, left, right, strict=True):
                torch.mm(gradient.T, p, out=q)
        own = [q.clone() for q in right] if self._memory == "local" else right
        self.comm.allreduce_inplace(right_flat, ReduceOp.SUM)
        self.kernels.divide_(right_flat, self.comm.nranks())

        usable = [a and b for a, b in zip(usable, _are_finite(right_flat, right), strict=True)]
        with codec_phase("decompress"):
            for place, (a, gradient) in enumerate(zip(self.matrices, gradients, strict=True)):
                if usable[place]:
                    self._decompress(a.name, gradient, left[place], right[place], own[place])
                else:  # on every rank, as the sums are equal; memories would be NaN for ever
                    gradient.fill_(torch.nan)
                a.put_back(gradient, wide)
        if wide is not x:
            x.copy_(wide)

    def _sum_left_factors(
        self, x: Tensor, gradients: Sequence[Tensor], queries: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[bool]]:
        """All-reduce every P together with the uncompressed gradients; return the P, and whether each
        is finite.
        """
        ends = [0, *(a.end for a in self.matrices)]
        starts = [*(a.start for a in self.matrices), x.numel()]
        others = [x[end:start] for end, start in zip(ends, starts, strict=True)]
        rest = sum(other.numel() for other in others)
        message, left = _matrices(x, [(a.n, a.r) for a in self.matrices], rest)
        with codec_phase("compress"):
            for gradient, q, p in zip(gradients, queries, left, strict=True):
                torch.mm(gradient, q, out=p)
        summed, plain = message[: message.numel() - rest], message[message.numel() - rest :]
        torch.cat(others, out=plain)
        self.comm.allreduce_inplace(message, ReduceOp.SUM)
        self.kernels.divide_(plain, self.comm.nranks())
        torch._foreach_copy_(others, plain.split([other.numel() for other in others]))
        return left, _are_finite(summed, left)

    def _decompress(self, name: str, gradient: Tensor, p: Tensor, q: Tensor, own: Tensor) -> None:
        """Replace M with ``P Q^T``, and store Q and the residual."""
        self._factors[name].copy_(q)
        if self._memory is not None and own.shape[1] == 1:  # one pass instead of two
            torch.addcmul(gradient, p, own.T, value=-1, out=self._errors[name])
        elif self._memory is not None:
            self._errors[name].copy_(gradient).addmm_(p, own.T, alpha=-1)
        torch.mm(p, q.T, out=gradient)


def _matrices(
    like: Tensor, shapes: Sequence[tuple[int, int]], more: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return a new flat tensor and its views as matrices of these shapes; ``more`` elements follow
    at the end.

    Their columns are contiguous: products with such thin matrices are up to 25 times as fast.
    """
    sizes = [rows * columns for rows, columns in shapes]
    flat = like.new_empty(sum(sizes) + more)
    parts = flat[: sum(sizes)].split(sizes)
    return flat, [
        part.view(columns, rows).T for part, (rows, columns) in zip(parts, shapes, strict=True)
    ]


def _are_finite(flat: Tensor, parts: Sequence[Tensor]) -> list[bool]:
    """Return whether each of the parts that fill ``flat`` is finite."""
    return (
        [True] * len(parts)
        if flat.isfinite().all()
        else [bool(part.isfinite().all()) for part in parts]
    )
