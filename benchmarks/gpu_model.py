"""A model of what bounds each CUDA kernel on a GPU, from counts of its PTX.

Each kernel's demands are divided by the published limits of a GPU; nothing is measured on one.

    python benchmarks/gpu_model.py                          every call, some minutes
    python benchmarks/gpu_model.py --only causal --device "H100 SXM"
    python benchmarks/gpu_model.py --markdown table.md --json counts.json

It needs nvcc and a torch with CUDA, but no GPU: the PTX machine (simulators/ptx_machine) executes the
kernels on the CPU and counts. SELFATTN_LIBRARY may name a library that is already built for it; otherwise
this builds one, which takes minutes. gpu_model_cases.py holds the calls, gpu_model_counts.py derives from
their counts, gpu_model_limits.py holds the devices. docs/cuda-performance.md has the formulas and the
sources.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_model_counts
import gpu_model_limits as limits
from gpu_model_cases import Shape, shapes
from gpu_model_counts import Kernel
from gpu_model_limits import DEVICES, RESOURCES, Device

from selfattn_ext import bench
from selfattn_ext.bench import report
from selfattn_ext.bench.cases import as_json
from selfattn_ext.terminal import CommandError, check_output, table

#: Kernels that take a smaller share of their call's time, by the model, are left out of tables.
LEAST_SHARE = 0.03
#: A larger deviation is not rounding: the counts do not grow as gpu_model_cases.py says.
MOST_DEVIATION = 0.01

Counted = Sequence[tuple[Shape, Sequence[Kernel]]]


def label(shape: Shape) -> str:
    case = shape.case
    direction = "f+b" if case.backward else "forward"
    return " ".join(filter(None, [case.dtype_name, str(case.shape), case.options(), direction]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [device.name for device in DEVICES]
    parser.add_argument("--only", metavar="TEXT", help="only calls whose names in the table contain it")
    parser.add_argument(
        "--device", action="append", choices=names, help="a device of the tables (default: all)"
    )
    parser.add_argument(
        "--counts", type=Path, metavar="FILE", help="keep counts in this file, and read it if it exists"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write counts and times to this file; - is standard output"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(parsed: argparse.Namespace) -> int:
    bench.check_json(parsed.json)
    if parsed.markdown is not None:
        check_output("--markdown", parsed.markdown, (".md",))
    numbers = [n for n, shape in enumerate(shapes()) if (parsed.only or "") in label(shape)]
    if not numbers:
        raise CommandError(f"no call has {parsed.only!r} in its name")
    devices = [device for device in DEVICES if parsed.device is None or device.name in parsed.device]
    counted = gpu_model_counts.count(numbers, parsed.counts)
    deviations = {
        f"{label(shape)}, {kernel.name}": kernel.deviation for shape, kernels in counted for kernel in kernels
    }
    worst = max(deviations, key=lambda name: deviations[name])
    if deviations[worst] > MOST_DEVIATION:
        problem = f"the counts of {worst} do not grow as they should: they differ by {deviations[worst]:.1%}"
        raise CommandError(problem, exit_code=1)
    note = (
        f"A model, {datetime.date.today()}; nothing was measured on a GPU. Counts were derived from smaller "
        f"calls; where that was checked, the largest difference was {deviations[worst]:.2%}."
    )
    counts = counts_table(counted)
    tables = [("Instructions, memory", *counts), *((of.name, *bounds_table(counted, of)) for of in devices)]
    parts = [note, *(f"{title}\n{table(header, cells, left=2)}" for title, header, cells in tables)]
    data = {**report.head(" ".join(["benchmarks/gpu_model.py", *sys.argv[1:]])), "rows": as_data(counted)}
    bench.emit("\n\n".join(parts), report.dump(data), parsed.json)
    if parsed.markdown is not None:
        in_markdown = [note, as_markdown(*counts), as_markdown(*summary(counted, devices))]
        parsed.markdown.write_text("\n\n".join([*in_markdown, ""]), encoding="utf-8")
    return 0


def shown(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels that matter in their call, on any of the devices."""
    found = []
    for kernel in kernels:
        for device in DEVICES:
            whole = sum(limits.bound(other.counts, device).least for other in kernels)
            if limits.bound(kernel.counts, device).least >= LEAST_SHARE * whole:
                found.append(kernel)
                break
    return found


def counts_table(counted: Counted) -> tuple[list[str], list[list[str]]]:
    """Returns the table of counts, which do not depend on the device."""
    header = ["call", "kernel", "blocks", "mma", "issued / mma", "all PTX / mma", "MB read", "MB written"]
    header += ["MB at L2", "bank conflicts"]
    cells = []
    for shape, kernels in counted:
        for kernel in shown(kernels):
            counts = kernel.counts
            products = limits.tensor_products(counts)
            every = sum(value for name, value in counts.items() if name.startswith("instructions."))
            cells.append(
                [
                    label(shape),
                    kernel.name,
                    f"{counts['blocks']:.0f}",
                    f"{products:.3g}" if products else "-",
                    f"{limits.issued(counts) / products:.2f}" if products else "-",
                    f"{every / products:.2f}" if products else "-",
                    f"{megabytes(counts['sectors.read']):.1f}",
                    f"{megabytes(counts['sectors.written']):.1f}",
                    f"{megabytes(limits.l2_sectors(counts)):.0f}",
                    f"{limits.conflicts(counts):.1%}",
                ]
            )
    return header, cells


def megabytes(sectors: float) -> float:
    return sectors * limits.SECTOR_BYTES / 1e6


def bounds_table(counted: Counted, device: Device) -> tuple[list[str], list[list[str]]]:
    """Returns for each kernel its least time, what bounds it, and each resource's share of that time."""
    header = ["call", "kernel", "at least µs", "bound by", *RESOURCES, "issue, all PTX"]
    cells = []
    for shape, kernels in counted:
        for kernel in shown(kernels):
            bound = limits.bound(kernel.counts, device)
            shares = [f"{bound.share(resource):.0%}" for resource in RESOURCES]
            shares.append(f"{bound.ptx_issue / bound.least:.0%}")
            cells.append([label(shape), kernel.name, f"{1e6 * bound.least:.1f}", bound.resource, *shares])
    return header, cells


def summary(counted: Counted, devices: Sequence[Device]) -> tuple[list[str], list[list[str]]]:
    """Returns for each device the least time in µs, what bounds it, and which resource comes next."""
    header = ["call", "kernel", *(device.name for device in devices)]
    header.append(f"issue, all PTX, {devices[0].name}")
    cells = []
    for shape, kernels in counted:
        for kernel in shown(kernels):
            bounds = [limits.bound(kernel.counts, device) for device in devices]
            of_devices = [
                f"{1e6 * bound.least:.0f} {bound.resource} ({bound.next} {bound.share(bound.next):.0%})"
                for bound in bounds
            ]
            issue = f"{bounds[0].ptx_issue / bounds[0].least:.0%}"
            cells.append([label(shape), kernel.name, *of_devices, issue])
    return header, cells


def as_markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_data(counted: Counted) -> list[dict[str, Any]]:
    return [
        {
            "case": as_json(shape.case),
            "forced": shape.kernel,
            "kernel": kernel.name,
            "counts": kernel.counts,
            "deviation": kernel.deviation,
            "model_seconds": {
                device.name: dict(limits.bound(kernel.counts, device).seconds) for device in DEVICES
            },
        }
        for shape, kernels in counted
        for kernel in kernels
    ]


if __name__ == "__main__":
    sys.exit(main())
