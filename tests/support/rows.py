"""Random rows of a mixture of experts, and moves of rows, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """Pairs [T, k] of tokens and choices, and m rows. Some pairs have a row.

    Attributes:
      row_of_pair: [T, k], out of range if a pair has no row.
      pair_of_row: [m], out of range if a row has no pair.
      weights: [T, k] float32.
      count: the number of valid rows, or None if all rows are valid.
    """

    row_of_pair: np.ndarray
    pair_of_row: np.ndarray
    weights: np.ndarray
    count: int | None

    @classmethod
    def random(cls, rng, tokens, choices, rows=None, *, missing=0.1, counted=False):
        """Returns random pairs.

        `missing` is the share of pairs that have no row although rows are left.
        """
        pairs = tokens * choices
        rows = pairs if rows is None else rows
        pair_of_row = rng.choice([-1, -(2**31), pairs, 2**31 - 1], rows)
        row_of_pair = rng.choice([-1, -(2**31), rows, 2**31 - 1], pairs)
        having = rng.permutation(pairs)[: int(min(pairs, rows) * (1 - missing))]
        places = rng.permutation(rows)[: having.size]
        pair_of_row[places], row_of_pair[having] = having, places
        return cls(
            row_of_pair.reshape(tokens, choices).astype(np.int32),
            pair_of_row.astype(np.int32),
            rng.standard_normal((tokens, choices)).astype(np.float32),
            int(rng.integers(0, rows + 1)) if counted else None,
        )

    @property
    def choices(self) -> int:
        return self.row_of_pair.shape[1]

    @property
    def valid(self) -> int:
        return len(self.pair_of_row) if self.count is None else self.count

    def token_of_row(self) -> np.ndarray:
        """Returns the token of each row [m], which is -1 or out of range if the row has no pair."""
        return np.where(self.pair_of_row < 0, -1, self.pair_of_row // self.choices).astype(np.int32)

    def has_row(self) -> np.ndarray:
        """Returns whether each pair [T, k] has a valid row."""
        return (self.row_of_pair >= 0) & (self.row_of_pair < self.valid)


def gather(x, index, valid):
    """Returns the first `valid` rows of x[index], and zeros where an index is out of range."""
    out = np.zeros((valid, *x.shape[1:]), x.dtype)
    for row, token in enumerate(index[:valid]):
        if 0 <= token < len(x):
            out[row] = x[token]
    return out


def combine(rows, pairs: Pairs, weights=None):
    """Returns the sum of the rows of each token, in float64."""
    out = np.zeros((len(pairs.row_of_pair), *rows.shape[1:]))
    for token, choice in np.argwhere(pairs.has_row()):
        row = np.asarray(rows[pairs.row_of_pair[token, choice]], np.float64)
        out[token] += row * (1 if weights is None else np.float64(weights[token, choice]))
    return out


def combine_magnitude(rows, pairs: Pairs, weights=None):
    """Returns the sum of the magnitudes of each token's rows, to which errors are relative."""
    weights = None if weights is None else np.abs(weights)
    return combine(np.abs(np.asarray(rows, np.float64)), pairs, weights)


def check_sorted(expert_order, experts, num_experts):
    """Asserts that order, inverse and group sizes are those of a stable sort by expert."""
    experts = np.asarray(experts).reshape(-1)
    here = (experts >= 0) & (experts < num_experts)
    order = np.argsort(np.where(here, experts, num_experts), kind="stable")
    np.testing.assert_array_equal(expert_order.order, order)
    inverse = np.asarray(expert_order.inverse).reshape(-1)
    np.testing.assert_array_equal(inverse[order], np.arange(order.size))
    counts = np.bincount(experts[here], minlength=num_experts)[:num_experts]
    np.testing.assert_array_equal(expert_order.group_sizes, counts)
