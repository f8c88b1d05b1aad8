"""The choice of kernels: which are compiled, which can run here, which one a call takes, and why.

Each operator has several kernels. On the CPU, "fused" is tiled and vectorised, compiled once per instruction
set, and chosen automatically; "loops" is the formula as three nested loops, to read and to compare with, and
runs only when asked for::

    with selfattn_ext.backends.use("loops"):
        out = selfattn_ext.scaled_dot_product_attention(query, key, value)

On CUDA, in builds that have kernels for it, "sm90" takes 16-bit numbers on Hopper, "sm80" takes other calls
that tensor cores can compute, and "simt" takes every call.

The environment variable SELFATTN_KERNEL names the kernel for a whole process, SELFATTN_CPU_ISA the
instruction set (amx, avx512_bf16, avx512, avx2 and scalar on x86-64, neon and scalar on arm64);
:func:`use_cpu_isa` sets the latter inside a process. avx512_bf16 and amx pass calls that they do not compute
faster to avx512, and :func:`explain` says so. A forced amx passes on only calls that it cannot compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops
from .arguments import (
    DEFAULT_QUERY_OFFSET,
    DEFAULT_SOFTCAP,
    DEFAULT_WINDOW,
    AttentionCall,
    AttentionOptions,
    Prepared,
    call_checks,
    keywords_of,
    precision,
    prepare,
)
from .arguments import forced_kernel as _forced
from .build import library

__all__ = ["Explanation", "Kernel", "available", "cpu_isas", "explain", "kernels", "use", "use_cpu_isa"]


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Args:
        name: "fused" or "loops" on the CPU, "sm90", "sm80" or "simt" on CUDA.
        isa: the instruction set on the CPU, "cuda" on CUDA.
        description: a sentence for people.
        dtypes: the names of the dtypes that it takes.
        automatic: whether it is chosen without being asked for.
        reason: why this machine cannot run it; None if it can.

    Example:
        >>> from selfattn_ext import backends
        >>> loops = next(kernel for kernel in backends.kernels() if kernel.name == "loops")
        >>> loops.available, loops.automatic, loops.dtypes
        (True, False, ('float64', 'float32', 'bfloat16', 'float16'))
    """

    name: str
    isa: str
    description: str
    dtypes: tuple[str, ...]
    automatic: bool
    reason: str | None

    @property
    def available(self) -> bool:
        """Whether this machine can run it."""
        return self.reason is None

    def __str__(self) -> str:
        state = "available" if self.reason is None else f"not available: {self.reason}"
        return f"{self.name}/{self.isa}: {self.description} ({state})"


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call takes, and why each of the others does not run. ``str()`` of it is for people.

    Args:
        kernel, isa: the kernel, as :class:`Kernel` has them.
        device, dtype: those of the query, as strings.
        float32_precision: the precision of products of float32 numbers; None for other dtypes.
        threads: the number of threads; None on CUDA.
        refused: for each other kernel, as "name/isa", the reason.

    Example:
        >>> import torch
        >>> from selfattn_ext import backends
        >>> explanation = backends.explain(*torch.randn(3, 1, 2, 16, 8).unbind())
        >>> explanation.kernel, explanation.device, explanation.dtype
        ('fused', 'cpu', 'float32')
    """

    kernel: str
    isa: str
    device: str
    dtype: str
    float32_precision: str | None
    threads: int | None
    refused: dict[str, str]

    def __str__(self) -> str:
        dtype = f"{self.dtype} ({self.float32_precision})" if self.float32_precision else self.dtype
        threads = "" if self.threads is None else f", {self.threads} threads"
        lines = [f"{self.kernel}/{self.isa} on {self.device}, {dtype}{threads}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def _row(row: dict[str, Any]) -> Kernel:
    return Kernel(
        name=row["name"],
        isa=row["isa"],
        description=row["description"],
        dtypes=tuple(row["dtypes"]),
        automatic=row["automatic"],
        reason=row["reason"],
    )


def kernels(device: torch.device | str = "cpu") -> list[Kernel]:
    """Every compiled kernel for a kind of device, best first, also those that this machine cannot run.

    Args:
        device: "cpu" or "cuda". ``reason`` is about the GPU that is named, or the current one.

    Returns:
        The kernels; none for "cuda" in a build without CUDA, and none for other kinds of devices.

    Raises:
        RuntimeError: ``device`` names no device that torch knows.

    Example:
        >>> from selfattn_ext import backends
        >>> sorted({kernel.name for kernel in backends.kernels()})
        ['fused', 'loops']
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return [_row(row) for row in library.extension().kernel_table()]
    if wanted.type != "cuda":
        return []
    if torch.cuda.is_available():
        return [_row(row) for row in library.extension().cuda_kernel_table(_capability(wanted))]
    missing = "there is no GPU that torch can use"
    return [_row({**row, "reason": missing}) for row in library.extension().cuda_kernel_table(90)]


def available(device: torch.device | str = "cpu") -> list[Kernel]:
    """The kernels that this machine can run, best first.

    Args:
        device: as :func:`kernels` takes it.

    Returns:
        Those of :func:`kernels` whose ``reason`` is None.

    Example:
        >>> from selfattn_ext import backends
        >>> all(kernel.reason is None for kernel in backends.available())
        True
        >>> device = "cuda" if backends.available("cuda") else "cpu"
    """
    return [kernel for kernel in kernels(device) if kernel.available]


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def cpu_isas() -> list[str]:
    """The instruction sets of the CPU whose fused kernels this machine can run.

    Returns:
        Their names, best first, as :func:`use_cpu_isa` takes them.

    Example:
        >>> from selfattn_ext import backends
        >>> "scalar" in backends.cpu_isas()
        True
    """
    return list(dict.fromkeys(kernel.isa for kernel in available() if kernel.automatic))


def forced_kernel() -> str:
    """The kernel that :func:`use` or SELFATTN_KERNEL asks for, "" for the automatic choice."""
    return _forced.current()


@contextmanager
def use(name: str) -> Iterator[None]:
    """Inside the ``with`` block, calls of this thread or task take the kernel ``name``; "" is the automatic
    choice.

    A gradient takes the kernel of its forward, wherever it is computed. torch computes gradients of CUDA
    tensors in threads of its own; if activation checkpointing repeats a forward there, its kernel is chosen
    automatically. SELFATTN_KERNEL holds for all threads.

    Args:
        name: the ``name`` of a :class:`Kernel`, or "".

    Returns:
        A context manager. Blocks may be nested.

    Raises:
        ValueError: no kernel has that name, or this machine cannot run it.

    Example:
        >>> import torch
        >>> from selfattn_ext import backends, scaled_dot_product_attention
        >>> query, key, value = torch.randn(3, 1, 2, 16, 8).unbind()
        >>> with backends.use("loops"):
        ...     out = scaled_dot_product_attention(query, key, value)
        >>> torch.allclose(out, scaled_dot_product_attention(query, key, value), atol=1e-6)
        True
    """
    _check_name(name)
    with _forced.use(name):
        yield


@contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Inside the ``with`` block, the whole process uses the kernels of one instruction set; "" is automatic.

    Args:
        name: one of :func:`cpu_isas`, or "".

    Returns:
        A context manager.

    Raises:
        ValueError: the instruction set is unknown, or this machine lacks it.

    Example:
        >>> import torch
        >>> from selfattn_ext import backends
        >>> with backends.use_cpu_isa("scalar"):
        ...     print(backends.explain(*torch.randn(3, 1, 2, 16, 8).unbind()).isa)
        scalar
    """
    extension = library.extension()
    before = extension.cpu_isa()
    extension.set_cpu_isa(name)
    try:
        yield
    finally:
        extension.set_cpu_isa(before)


def _check_name(name: str) -> None:
    on_cuda = {kernel.name: kernel for kernel in kernels("cuda")}
    if name not in on_cuda or name in {kernel.name for kernel in kernels()}:
        _choose(name)
    elif (reason := on_cuda[name].reason) is not None:
        raise ValueError(f'kernel "{name}" cannot run here: {reason}')


def _choose(name: str) -> Kernel:
    return _row(library.extension().choose_kernel(name))


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: Sequence[int] = DEFAULT_WINDOW,
    softcap: float = DEFAULT_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_offset: int = DEFAULT_QUERY_OFFSET,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Explanation:
    """Tells which kernel :func:`selfattn_ext.scaled_dot_product_attention` takes for these arguments, and why
    it takes no other.

    Args:
        query, key, value: as that function takes them. Nothing is computed from them.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: likewise.
        window_size, softcap, alibi_slopes, sinks, query_offset: likewise.
        return_weights, return_lse: likewise.

    Returns:
        An :class:`Explanation`.

    Raises:
        ValueError, TypeError: for arguments that the function would refuse, with the same message; on CUDA
            also if a kernel is asked for that does not take the call.

    Example:
        >>> import torch
        >>> from selfattn_ext import backends
        >>> query, key, value = torch.randn(3, 1, 2, 16, 8).unbind()
        >>> explanation = backends.explain(query, key, value, is_causal=True)
        >>> explanation.refused["loops/scalar"]
        'runs only when asked for, with selfattn_ext.backends.use("loops")'
    """
    options = AttentionOptions(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, sinks,
        query_offset, return_weights, return_lse,
    )  # fmt: skip
    call = AttentionCall(query, key, value, options)
    call_checks.attention(call)
    prepared = prepare(call)
    explained = _explain_on_cuda if query.device.type == "cuda" else _explain_on_cpu
    return explained(prepared, _reasons(prepared), forced_kernel())


def _reasons(call: Prepared) -> list[str]:
    """Asks each kernel of the device, best first, why it does not take exactly this call; "" if it does."""
    tensors, scale, options, _ = call
    query, key, value = tensors[:3]
    if "dropout_p" in options:
        tensors = tensors._replace(seed=torch.zeros(1, dtype=torch.int64, device=query.device))
    return ops.attention_refusals(query, key, value, scale, **keywords_of(tensors, options)).split("\n")


def _explain_on_cpu(call: Prepared, reasons: Sequence[str], forced: str) -> Explanation:
    query = call[0].query
    taken = chosen = _choose(forced)
    reason = dict(zip(kernels(), reasons, strict=True))[chosen]
    if reason:  # it names the instruction set that computes the call instead
        isa = reason.split()[-1]
        taken = next(kernel for kernel in kernels() if (kernel.name, kernel.isa) == (chosen.name, isa))
    return Explanation(
        kernel=taken.name,
        isa=taken.isa,
        device=str(query.device),
        dtype=str(query.dtype).removeprefix("torch."),
        float32_precision=precision.current() if query.dtype is torch.float32 else None,
        threads=torch.get_num_threads(),
        refused={
            f"{kernel.name}/{kernel.isa}": reason if kernel == chosen else _refusal(kernel, taken, forced)
            for kernel in kernels()
            if kernel != taken
        },
    )


def _explain_on_cuda(call: Prepared, lines: Sequence[str], forced: str) -> Explanation:
    query, options = call[0].query, call[2]
    reasons = dict(zip((kernel.name for kernel in kernels(query.device)), lines, strict=True))
    takers = [name for name, reason in reasons.items() if not reason]
    if forced and forced not in takers:
        known = ", ".join(f'"{name}"' for name in reasons)
        reason = reasons.get(forced) or f"it is none of the kernels for CUDA, {known}"
        raise ValueError(f'kernel "{forced}" is asked for and does not take this call: {reason}')
    if not takers:
        raise ValueError(f"no kernel takes this call: {reasons}")
    taken = forced or takers[0]
    refused = {
        f"{name}/cuda": reason or (f"{forced} is asked for" if forced else f"{taken} is faster")
        for name, reason in reasons.items()
        if name != taken
    }
    return Explanation(
        kernel=taken,
        isa="cuda",
        device=str(query.device),
        dtype=str(query.dtype).removeprefix("torch."),
        float32_precision=options.get("float32_precision", "highest")
        if query.dtype is torch.float32
        else None,
        threads=None,
        refused=refused,
    )


def _refusal(kernel: Kernel, chosen: Kernel, forced: str) -> str:
    if kernel.reason is not None:
        return kernel.reason
    if forced and kernel.name != forced:
        return f"{forced} is asked for"
    if not kernel.automatic:
        return f'runs only when asked for, with selfattn_ext.backends.use("{kernel.name}")'
    if library.extension().cpu_isa():
        return f"the instruction set {library.extension().cpu_isa()} is forced"
    return f"{chosen.isa} is faster"
