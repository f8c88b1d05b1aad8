"""Integers in score functions have 64 bits, as in torch, or 32 where no result shows it."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functions import ALL, Functions, flex_attention, formula, tensors
from operations import BINARY, DIVISIONS, INTEGERS, UNARY
from torch import Tensor
from written import Written, number_of

from selfattn_ext import attention_with_kvcache, varlen_attention
from selfattn_ext.flex.cuda_source import headers_of
from selfattn_ext.flex.source import source_of
from selfattn_ext.flex.tracing import trace

pytestmark = [pytest.mark.cpu_only, pytest.mark.filterwarnings("error:selfattn_ext does not compile")]

CPU = torch.device("cpu")
ROWS = 70
SIZES = (1, 2, ROWS, ROWS)
SIGNED = torch.arange(ROWS) - 35
HIGH = torch.arange(1, 2 * ROWS) * 2**32
LARGE = (torch.arange(ROWS) - 20) * 0x123456789ABCDEF


def check(functions: Functions, create_graph: bool = False) -> None:
    """Compares the functions with the formula in torch."""
    given = tensors(SIZES, torch.float64)
    out = flex_attention(*given, functions.score_mod)
    expected = formula(*given, functions).out
    torch.testing.assert_close(out, expected)
    grads, right = (
        torch.autograd.grad(result.sin().sum(), given, create_graph=create_graph)
        for result in (out, expected)
    )
    torch.testing.assert_close(grads, right)


def test_products_and_constants_have_64_bits() -> None:
    table, factor = torch.randn(97, dtype=torch.float64), torch.tensor(3037000499)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = torch.where(i - j < sys.maxsize, s, -100.0)
        s = s + table[(i * 46341 * 46341 + j) % 97]  # places in a matrix of many rows
        s = s + 0.1 * (((i * ROWS + j) * 0x9E3779B97F4A7C15 >> 40) & 15)  # a hash
        s = s + ((i + 1) ** SIGNED[j]).double() * 1e-9
        s = s + (j + (2**53 + 1)) % 2 + torch.where(torch.signbit(s * 0), 1, 0.5)
        return s * table[(i * factor + j) % 97] + ((i << 40) + j) % 1009 * 0.001

    check(Functions(score_mod))
    check(Functions(score_mod), create_graph=True)


def test_windows_of_no_size() -> None:
    """A window that stands for no limit hides nothing, in packed calls and on caches."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv < sys.maxsize) & (kv - q < 2**31) & (q * 2**31 >= kv - 1)

    query, key, value = (torch.randn(9, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 4, 9])
    plain = varlen_attention(query, key, value, starts, starts, 5, 5)
    hidden = varlen_attention(query, key, value, starts, starts, 5, 5, mask_mod=mask_mod)
    sees_all = [1, 2, 3, 5, 6, 7, 8]  # but query 0 sees keys 0 and 1
    torch.testing.assert_close(hidden[sees_all], plain[sees_all])
    caches = torch.randn(2, 1, 2, 12, 8)
    last = torch.randn(1, 2, 1, 8)
    plain = attention_with_kvcache(last, *caches, cache_seqlens=11)
    for positions in (None, torch.tensor([2**31])):
        given: dict[str, Any] = {"query_offset": positions, "mask_mod": mask_mod}
        torch.testing.assert_close(attention_with_kvcache(last, *caches, cache_seqlens=11, **given), plain)
    near = {"query_offset": torch.tensor([2**33]), "mask_mod": lambda b, h, q, kv: q - kv < 2**33 - 4}
    torch.testing.assert_close(
        attention_with_kvcache(last, *caches, cache_seqlens=11, **near),
        attention_with_kvcache(last, *caches[..., 5:, :], cache_seqlens=6),
    )


@pytest.mark.parametrize(
    "index",
    [
        lambda i, j: i * 2**32,
        lambda i, j: i + 2**32,
        lambda i, j: i + j * 0 + 2**32,  # neighbours
        lambda i, j: 2**32 + 30 - i - j * 0,
        lambda i, j: i + j * 0 + (2**63 - 10),
        lambda i, j: i * 0 + LARGE[j],
        lambda i, j: HIGH[i - j + ROWS - 1],
        lambda i, j: (i << 33) + j,
    ],
)
def test_places_beside_tensors(index: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The check of an index looks at all its bits."""
    table = torch.randn(ROWS, dtype=torch.float64, requires_grad=True)
    with pytest.raises(IndexError, match="captured tensor"):
        flex_attention(*tensors(SIZES, torch.float64), lambda s, b, h, i, j: s + table[index(i, j)])


def test_floats_are_no_indices() -> None:
    with pytest.raises(IndexError, match="tensors used as indices"):
        flex_attention(*tensors(SIZES, torch.float64), lambda s, b, h, i, j: s + SIGNED[i * 0.5])


def test_tensors_of_many_elements() -> None:
    """The size of these tensors alone makes offsets of more than 32 bits."""
    table = torch.tensor([0.5], dtype=torch.float64).expand(2**31 + 100)
    check(Functions(lambda s, b, h, i, j: s * table[2**31 + i] + table[j]))


#: Operations on two integers, and on one.
_TWO = ["add", "sub", "mul", "floor_divide", "remainder", "fmod", "minimum", "maximum", "pow"]
_TWO += ["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]
_TWO += ["x / y to 0", "the larger", "x + 3 * y", "x - 2 * y", "y - x"]
_OF_ONE = ["neg", "bitwise_not", "abs", "square", "sign", "clamp", "clamp to most", "x to torch.int32"]
_OF_ONE += ["x to torch.int8", "x to torch.int64", "x << 2", "x >> 1", "1 - x", "x // 3", "x % 3", "x ** 2"]
_ONE: list[Callable[[Any], Any]] = [
    *(UNARY[name] for name in _OF_ONE),
    lambda a: a.clamp(-1000, 2**20),
    lambda a: a.clamp(0, 100) // 200,  # which is -56 in int8
    lambda a: (a > 3).long(),
    lambda a: a + 2**31,
    lambda a: a * 46341,
    lambda a: a << (a % 70 - 2),
    lambda a: a >> (a % 70 - 2),
]


def random_integers(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Makes a function of indices from some of these operations."""

    def function(q: Tensor, kv: Tensor) -> Tensor:
        choice = random.Random(seed)
        numbers: list[Tensor] = [q, kv, q - kv, LARGE[kv % ROWS], *(t[q % 5] for t in TABLES)]
        for _ in range(choice.randint(2, 7)):
            a, b = (choice.choice(numbers[-3:] + numbers) for _ in range(2))
            if choice.random() < 0.5:
                numbers.append(choice.choice(_ONE)(a))
            else:
                name = choice.choice(_TWO)
                numbers.append(BINARY[name](a, (b & 0x3F) + 1 if name in DIVISIONS else b))
        return numbers[-1]

    return function


def is_taken(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Says whether torch takes the function's constants, which a short dtype may not hold."""
    try:
        function(*torch.tensor([[1], [1]]))
    except RuntimeError:
        return False
    return True


TABLES = [
    torch.tensor([0, 1, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 3], dtype=dtype) for dtype in INTEGERS
]


def test_random_integers() -> None:
    """Numbers held in 32 bits fit into them: they equal torch's at both ends of the indices' ranges."""
    functions, sizes = [*filter(is_taken, map(random_integers, range(600)))], (1 << 20, 1 << 15)
    assert len(functions) > 500
    written = Written([number_of(function) for function in functions], sizes)
    assert {"int32_t", "int64_t"} <= set(re.findall(r"const (\w+) t\d+ = ", written.source))
    for queries in (range(6), range(sizes[0] - 6, sizes[0])):
        for keys in (range(6), range(sizes[1] - 6, sizes[1])):
            grid = torch.tensor(queries)[:, None].expand(6, 6), torch.tensor(keys).expand(6, 6)
            for number, function in enumerate(functions):
                found = written.compute(number, queries, keys)
                assert torch.equal(found, function(*grid).long()), number
                least, most = written.ranges.of(written.nodes[number])
                assert least <= found.min()
                assert found.max() <= most


def test_random_places() -> None:
    """Nothing outside a tensor is read: element 0 is read instead."""
    numbers = filter(is_taken, map(random_integers, range(300)))
    places = [place for place in numbers if place(*torch.tensor([[1], [1]])).dtype != torch.uint8]
    table, grid = (
        torch.arange(100, 140),
        [each.expand(6, 6) for each in (torch.arange(6)[:, None], torch.arange(6))],
    )
    written = Written([number_of(lambda q, kv, place=place: table[place(q, kv)]) for place in places], (6, 6))
    for number, place in enumerate(places):
        at = place(*grid).long()
        is_inside = (at >= -len(table)) & (at < len(table))
        expected = table[torch.where(is_inside, at, 0)]
        assert torch.equal(written.compute(number, range(6), range(6)), expected), number


def sources(functions: Functions, length: int) -> tuple[str, ...]:
    sizes = (2, 3, length, length)
    traced = trace(functions.score_mod, functions.mask_mod, torch.float32, CPU, True, sizes)
    return (source_of(traced.function), *headers_of(traced.function))


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("graph_distances", "conjunction")])
def test_usual_functions_have_32_bits(name: str) -> None:
    """This holds for all lengths. The other functions compute with captured integers, and with squares."""
    functions = ALL[name]((2, 3, 67, 71), torch.float32)
    found = sources(functions, 67)
    assert found == sources(functions, 5000) == sources(functions, 1_000_000) == sources(functions, 2**30)
    computed = [line for line in found[0].splitlines() if re.match(r"const int64_t [pqk]\d+ = ", line)]
    assert not [line for line in computed if "data" not in line]


def test_constants_are_no_part_of_the_source() -> None:
    def window(size: int) -> Functions:
        return Functions(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < size))

    assert sources(window(128), 5000) == sources(window(70_000), 5000)
    assert "int64_t t" not in sources(window(128), 5000)[0]
    assert sources(window(128), 5000) != sources(window(2**31), 5000)
    assert "2147483648" not in sources(window(2**31), 5000)[0]
    assert f"{2**53 + 1:#x}" in sources(window(2**53 + 1), 5000)[0]


@pytest.mark.parametrize("factor", [2**62, 0x9E3779B97F4A7C15])
def test_what_wraps_around_is_defined(factor: int) -> None:
    """In C++ a product of signed integers that overflows is undefined."""
    assert " = mul_of(" in sources(Functions(lambda s, b, h, q, kv: s + q * factor), 5000)[0]


def test_longer_inputs_change_the_source_where_they_must() -> None:
    table = torch.zeros(1)
    places = Functions(lambda s, b, h, q, kv: s + table[(q * 30_000 + kv) // 2**30 - 10])
    assert (
        sources(places, 2_000) == sources(places, 30_000) != sources(places, 70_000) == sources(places, 10**6)
    )
