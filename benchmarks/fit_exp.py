"""Prints the polynomials of csrc/cpu/algorithm/elementary.h: e^r = 1 + r * q(r) on |r| <= ln(2) / 2.

q interpolates expm1(r) / r at the Chebyshev nodes of the interval, in 50 digits. Needs mpmath,
which torch brings.
Run: python benchmarks/fit_exp.py
"""

from __future__ import annotations

from mpmath import cos, exp, expm1, log, lu_solve, matrix, mp, mpf, nstr, pi

mp.dps = 50
HALF_WIDTH = log(2) / 2 * mpf("1.0001")  # rounding of the reduction may land just outside


def fit(terms: int) -> list[mpf]:
    nodes = [HALF_WIDTH * cos(pi * (2 * i + 1) / (2 * terms)) for i in range(terms)]
    powers, targets = matrix(terms, terms), matrix(terms, 1)
    for row, node in enumerate(nodes):
        for column in range(terms):
            powers[row, column] = node**column
        targets[row] = expm1(node) / node
    return list(lu_solve(powers, targets))


def relative_error(coefficients: list[mpf]) -> mpf:
    def approximate(r: mpf) -> mpf:
        return 1 + r * sum(c * r**i for i, c in enumerate(coefficients))

    points = [HALF_WIDTH * (mpf(i) / 500 - 1) for i in range(1001)]
    return max(abs(approximate(r) / exp(r) - 1) for r in points)


for name, terms in (("float", 6), ("double", 12)):
    found = fit(terms)
    print(f"{name}: relative error {nstr(relative_error(found), 3)}")
    for coefficient in found:
        print("   ", nstr(coefficient, 20))
