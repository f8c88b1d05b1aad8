"""Computation of the polynomials in csrc/cpu/products/elementary.h.

They are q in e^r = 1 + r * q(r) on |r| <= ln(2) / 2 and, for weights that are rounded afterwards, in
2^f = 1 + f * q(f) on 0 <= f < 1. q interpolates, and is computed with 50 digits. This needs mpmath, which
torch installs. Run: python benchmarks/fit_exp.py
"""

from __future__ import annotations

from mpmath import cos, exp, expm1, log, lu_solve, matrix, mp, mpf, nstr, pi

mp.dps = 50
HALF_WIDTH = log(2) / 2 * mpf("1.0001")  # as rounding in the reduction may leave the interval


def nodes_of(terms: int, low: mpf, high: mpf) -> list[mpf]:
    """Returns Chebyshev nodes.

    If the interval begins at 0, where x * q(x) is exact, they are those of a slightly longer interval with
    one node more, which lies at 0 and is left out.
    """
    count = terms if low < 0 else terms + 1
    half = (high - low) / 2 if low < 0 else high / (1 + cos(pi / (2 * count)))
    return [high - half + half * cos(pi * (2 * i + 1) / (2 * count)) for i in range(terms)]


def fit(terms: int, low: mpf, high: mpf, base: mpf) -> list[mpf]:
    """Returns the coefficients of q in base^x = 1 + x * q(x) on low <= x <= high."""
    nodes = nodes_of(terms, low, high)
    powers, targets = matrix(terms, terms), matrix(terms, 1)
    for row, node in enumerate(nodes):
        for column in range(terms):
            powers[row, column] = node**column
        targets[row] = expm1(node * log(base)) / node
    return list(lu_solve(powers, targets))


def relative_error(coefficients: list[mpf], low: mpf, high: mpf, base: mpf) -> mpf:
    def approximate(x: mpf) -> mpf:
        return 1 + x * sum(c * x**i for i, c in enumerate(coefficients))

    points = [low + (high - low) * mpf(i) / 1000 for i in range(1001)]
    return max(abs(approximate(x) / base**x - 1) for x in points)


for name, terms, low, high, base in (
    ("float", 6, -HALF_WIDTH, HALF_WIDTH, exp(1)),
    ("double", 12, -HALF_WIDTH, HALF_WIDTH, exp(1)),
    *((f"float, short, {terms} terms", terms, mpf(0), mpf(1), mpf(2)) for terms in (4, 5, 6)),
):
    found = fit(terms, low, high, base)
    print(f"{name}: relative error {nstr(relative_error(found, low, high, base), 3)}")
    for coefficient in found:
        print("   ", nstr(coefficient, 20))
