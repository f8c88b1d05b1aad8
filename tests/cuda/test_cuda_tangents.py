"""Forward mode and second derivatives on tensors of a GPU, by the operators.

They cover every dtype, every branch of the kernels, and packed sequences with masks of their own.
"""

from __future__ import annotations

import gpu
import pytest
import torch
from tangent_case import Named, TangentCase, cotangents_from, gradients_for, judge, operators, tangents_of

gpu.need()

ON_THE_CPU = {"device": "cpu", "lse": True}
EVERYTHING = {"mask": "float heads", "is_causal": True, "query_offset": 5, "softcap": 1.5}
EVERYTHING |= {"alibi": 2, "sinks": 2, "dropout_p": 0.3}
CASES = [
    TangentCase(1, 2, 1, 66, 70, 24, 40, torch.float32, **ON_THE_CPU),
    TangentCase(1, 2, 1, 66, 70, 24, 40, torch.bfloat16, **ON_THE_CPU, **EVERYTHING),
    TangentCase(1, 1, 1, 5, 65, 130, 16, torch.float16, mask="float rows", window=(9, 2), **ON_THE_CPU),
    TangentCase(
        2, 2, 1, 33, 40, 8, 130, torch.float64, missing=("query", "value"), **ON_THE_CPU, **EVERYTHING
    ),
]


def on_device(named: Named) -> Named:
    return {name: tensor.to("cuda") for name, tensor in named.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_tangents_and_second_derivatives(case: TangentCase) -> None:
    given = case.given()
    tangents, gradients = tangents_of(case, given), gradients_for(case, given)
    results = operators(case, "", case.numbers(), *map(on_device, (given, tangents, gradients)))
    assert all(result.is_cuda for result in results.values())
    found = {name: result.cpu() for name, result in results.items()}
    judge(case, given, tangents, cotangents_from(case, gradients), found)


@torch.no_grad()
def test_packed_sequences_with_masks_of_their_own() -> None:
    """Each sequence has the bits that it has alone."""
    lengths = ((5, 40), (0, 3), (70, 9))
    cases = [
        TangentCase(1, 2, 1, *of, dtype=torch.float32, mask="float square", seed=n)
        for n, of in enumerate(lengths)
    ]
    of_each = []
    for case in cases:
        given = case.given()
        of_each.append(
            [on_device(it) for it in (given, tangents_of(case, given), gradients_for(case, given))]
        )

    def joined(part: int) -> Named:
        return {
            name: torch.cat([of[part][name].reshape(-1) for of in of_each])
            if name == "attn_mask"
            else torch.cat([of[part][name] for of in of_each], 2)
            for name in of_each[0][part]
        }

    numbers = {"mask_shapes": [size for of in of_each for size in of[0]["attn_mask"].shape[1:]]}
    given = joined(0)
    for side, name in enumerate(("q", "k")):
        starts = torch.tensor([0, *(of[side] for of in lengths)], device="cuda").cumsum(0)
        given[f"cu_seqlens_{name}"] = starts
        numbers[f"max_seqlen_{name}"] = max(of[side] for of in lengths)
    together = operators(cases[0], "", numbers, given, joined(1), joined(2))
    rows, keys, elements = 0, 0, 0
    for case, of in zip(cases, of_each, strict=True):
        alone = operators(case, "", {}, *of)
        for name, result in together.items():
            side = keys if name.endswith(("key", "value")) else rows
            length = case.keys if name.endswith(("key", "value")) else case.queries
            if name == "grad of attn_mask":
                part = result[elements : elements + case.queries * case.keys]
                assert torch.equal(part, alone.get(name, part).reshape(-1))
            else:
                part = result[:, :, side : side + length]
                assert torch.equal(part, alone.get(name, part)), name
        rows, keys, elements = rows + case.queries, keys + case.keys, elements + case.queries * case.keys
