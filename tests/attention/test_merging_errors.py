"""merge_attention names the part that does not fit, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfattn_ext import merge_attention

OUT, LSE = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 5)
PACKED = torch.ones(5, 4, 8)
JAGGED = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged)

#: name -> (outs, lses, exception, words in the message).
BAD: dict[str, tuple[Any, Any, type[Exception], list[str]]] = {
    "no parts": ([], [], ValueError, ["outs", "at least one part"]),
    "a stack of no parts": (OUT[:0], LSE[:0], ValueError, ["outs", "at least one part"]),
    "no log-sum-exps": ([OUT], [], ValueError, ["lses", "at least one part"]),
    "fewer log-sum-exps": ([OUT, OUT], [LSE], ValueError, ["lses", "outs", "2", "1"]),
    "a number": (torch.tensor(1.0), LSE, ValueError, ["outs", "first dimension", "()"]),
    "a set": ({1}, [LSE], TypeError, ["outs", "list", "tuple", "set"]),
    "not a tensor": ([OUT, None], [LSE, LSE], TypeError, ["outs[1]", "torch.Tensor", "None"]),
    "sparse": ([OUT, OUT.to_sparse()], [LSE, LSE], TypeError, ["outs[1]", "dense"]),
    "jagged": (JAGGED, [LSE], TypeError, ["outs", "dense", "nested"]),
    "integers": ([OUT.long()], [LSE], TypeError, ["outs[0]", "float32", "int64"]),
    "dtypes of outs": (
        [OUT, OUT.half()],
        [LSE, LSE],
        TypeError,
        ["outs[1]", "outs[0]", "float16", "float32"],
    ),
    "dtypes of lses": (
        [OUT, OUT],
        [LSE, LSE.double()],
        TypeError,
        ["lses[1]", "lses[0]", "float64", "float32"],
    ),
    "a rounded lse": ([OUT.half()], [LSE.half()], TypeError, ["lses", "float32", "float16"]),
    "a narrow lse": ([OUT.double()], [LSE], TypeError, ["lses", "float64", "float32"]),
    "devices": ([OUT, OUT.to("meta")], [LSE, LSE], ValueError, ["outs[1]", "meta", "outs[0]", "one device"]),
    "devices of lses": ([OUT], [LSE.to("meta")], ValueError, ["lses[0]", "meta", "outs[0]", "one device"]),
    "one dimension": ([OUT[0, 0, 0]], [LSE[0, 0, 0]], ValueError, ["outs[0]", "(..., L, Ev)", "(8,)"]),
    "queries": (
        [OUT, OUT[:, :, :1]],
        [LSE, LSE[:, :, :1]],
        ValueError,
        ["outs[1]", "outs[0]", "(2, 4, 1, 8)", "(2, 4, 5, 8)", "same L"],
    ),
    "widths": ([OUT, OUT[..., :7]], [LSE, LSE], ValueError, ["outs[1]", "(2, 4, 5, 7)", "same L and Ev"]),
    "leading dimensions": (
        [OUT, torch.ones(3, 4, 5, 8)],
        [LSE, torch.ones(3, 4, 5)],
        ValueError,
        ["outs[1]", "(3, 4, 5, 8)", "broadcast", "(2, 4)"],
    ),
    "the shape of an lse": ([OUT], [LSE[0]], ValueError, ["lses[0]", "(2, 4, 5)", "(4, 5)"]),
    "packed results": (
        [PACKED],
        [PACKED[..., 0].T],
        ValueError,
        ["lses[0]", "(4, 5)", "out.transpose(-3, -2)"],
    ),
    "another layout": ([OUT.mT], [LSE], ValueError, ["lses[0]", "(2, 4, 8)", "(2, 4, 5)"]),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    outs, lses, exception, words = BAD[name]
    with pytest.raises(exception) as caught:
        merge_attention(outs, lses)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_hint_is_given_where_it_helps() -> None:
    with pytest.raises(ValueError, match=r"got \(4, 5\)$"):
        merge_attention([OUT], [LSE[0]])
