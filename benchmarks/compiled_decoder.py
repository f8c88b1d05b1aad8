"""Differences between a compiled and an eager decoder in bfloat16.

It prints the largest differences of the inputs of attention, of attention's results for the same inputs, and
of the model's output. Run: python benchmarks/compiled_decoder.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import selfattn_ext

HEADS, HEAD_DIM, LAYERS, BATCH, KEYS = 8, 64, 2, 2, 128
WIDTH = HEADS * HEAD_DIM
Caches = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, turn: Tensor) -> Tensor:
        def rotated(rows: Tensor) -> Tensor:
            first, second = rows.chunk(2, -1)
            return rows * turn[0] + torch.cat((-second, first), -1) * turn[1]

        parts = self.inputs(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in parts)
        out = selfattn_ext.attention_with_kvcache(
            rotated(query), *caches, rotated(key), value, cache_seqlens=lengths, is_causal=True
        )
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, caches: Caches, lengths: Tensor, turn: Tensor) -> Tensor:
        for block, pair in zip(self.blocks, caches, strict=True):
            x = block(x, pair, lengths, turn)
        return x


def recorded(run: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """Returns a model's result, and (operator, inputs, options, result) of each of its attention calls."""
    calls = []
    plain_call = torch._ops.OpOverload.__call__

    def call(operator: Any, *inputs: Any, **options: Any) -> Any:
        if operator.namespace != "selfattn":
            return plain_call(operator, *inputs, **options)
        kept = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        results = plain_call(operator, *inputs, **options)
        calls.append((operator, kept, options, results[0].clone()))
        return results

    torch._ops.OpOverload.__call__ = call
    try:
        return run(), calls
    finally:
        torch._ops.OpOverload.__call__ = plain_call


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().to(torch.bfloat16).eval()
    shape = (BATCH, HEADS, KEYS, HEAD_DIM)
    caches = [tuple(torch.randn(shape, dtype=torch.bfloat16) for _ in range(2)) for _ in range(LAYERS)]
    x, turn = torch.randn(BATCH, 1, WIDTH).to(torch.bfloat16) * 3, torch.randn(2, HEAD_DIM).to(torch.bfloat16)
    lengths = torch.tensor([70, 100])

    def run(function: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        own = [tuple(cache.to(dtype, copy=True) for cache in pair) for pair in caches]
        with torch.no_grad():
            return function(x.to(dtype), own, lengths, turn.to(dtype))

    def compiled_model() -> Callable[..., Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        run(compiled)
        return compiled

    # Eager calls bypass torch's OpOverload, which recorded() needs; a graph that is not optimised calls it.
    torch._dynamo.reset()
    plain = torch.compile(model, fullgraph=True, backend="eager")
    run(plain)
    eager, eager_calls = recorded(lambda: run(plain))
    assert torch.equal(eager, run(model))
    compiled = compiled_model()
    found, calls = recorded(lambda: run(compiled))
    with torch._inductor.config.patch(emulate_precision_casts=True):
        rounded = run(compiled_model())
    exact = run(model.double(), torch.float64)

    def largest(one: Tensor, other: Tensor) -> float:
        return float((one.double() - other.double()).abs().max())

    def error(result: Tensor) -> float:
        return float((result.double() - exact).square().mean().sqrt())

    print(f"inductor against eager, torch {torch.__version__}")
    for index, ((_, theirs, _, _), (operator, inputs, options, out)) in enumerate(
        zip(eager_calls, calls, strict=True)
    ):
        again = operator(*inputs, **options)[0]
        print(f"layer {index}: its queries differ by {largest(theirs[0], inputs[0]):.4f}")
        print(f"         attention to compiled code's inputs, called again: {largest(again, out):.4f}")
    print(f"output, up to {float(eager.abs().max()):.2f}, differs by {largest(found, eager):.4f}")
    print(f"         with emulate_precision_casts by {largest(rounded, eager):.4f}")
    print(f"RMS error against float64: compiled {error(found):.4f}, eager {error(eager):.4f}")


if __name__ == "__main__":
    main()
