"""DTensors pass this package's operators sharded on the batch, or on heads that ranks divide.

Those that are sharded otherwise, on the sequence or a head's elements, torch gathers first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops

__all__ = ["register_sharding"]

#: Results that are empty, or the gradients of what all ranks have.
_WHOLE = ("grad_mask", "grad_slopes", "grad_sinks")
#: Tensors by name that have a batch and heads as query has them.
_LIKE_QUERY = ("out_residual", "grad_row")


def register_sharding() -> None:
    """Makes DTensors known to attention: :func:`selfattn_ext.scaled_dot_product_attention` and torch's on the
    CPU then take query, key and value that are sharded on the batch or on heads.

    It holds for the whole process, and calling it again does no harm. Tensors that are sharded otherwise, or
    on heads that the ranks do not divide, are gathered first.

    Raises:
        ValueError, RuntimeError: later, by a call with dropout, which DTensors do not have.
        ImportError: this torch has no torch.distributed, or not the experimental function register_sharding,
            by which this works.

    Example:
        >>> import torch
        >>> from selfattn_ext import scaled_dot_product_attention
        >>> from selfattn_ext.distributed import register_sharding
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> register_sharding()
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> query = distribute_tensor(torch.randn(2, 4, 16, 8), mesh, [Shard(1)])  # by heads
        >>> scaled_dot_product_attention(query, query, query).placements
        (Shard(dim=1),)
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding as register

    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    aten = torch.ops.aten
    operators: tuple[Any, ...] = (
        ops.attention_forward,
        ops.attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    for operator in operators:
        register(operator)(partial(_shardings, operator))
        # torch remembers its findings by these arguments, one of which says whether there is a residual.
        names = [each.name for each in operator._schema.arguments if each.kwarg_only]
        known[operator] = RuntimeSchemaInfo(3, names, needs_pytree=True)


def _shardings(operator: Any, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """The shardings that an operator takes, as torch's register_sharding asks for them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    def is_tensor(value: Any) -> bool:
        return isinstance(value, (DTensorSpec, Tensor))

    if kwargs.get("dropout_p") or kwargs.get("dropout_seed") is not None:
        raise ValueError("DTensors have no dropout: each part would draw the same pattern")
    named = [name for name, value in kwargs.items() if is_tensor(value)]
    query = next(value for value in args if is_tensor(value))
    rounds = bool(kwargs.get("need_residual")) and query.tensor_meta.dtype in ops.SIXTEEN_BITS
    placements: list[Any] = [Replicate()]
    if all(name in _LIKE_QUERY for name in named):
        placements.append(Shard(0))
        # Otherwise ranks would have query heads whose keys are on other ranks.
        if all(value.tensor_meta.shape[1] % query.mesh.size() == 0 for value in args if is_tensor(value)):
            placements.append(Shard(1))
    found = []
    for placement in placements:
        results = [
            Replicate() if each.name in _WHOLE or (each.name == "out_residual" and not rounds) else placement
            for each in operator._schema.returns
        ]
        inputs = [placement if is_tensor(value) else None for value in args]
        found.append((results, inputs + [placement for _ in named]))
    return found
