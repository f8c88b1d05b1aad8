"""The benchmark on a GPU: this package against each backend of torch's attention.

    python benchmarks/gpu_run.py                          every case, some minutes
    python benchmarks/gpu_run.py --quick --json gpu.json
    python benchmarks/gpu_run.py --markdown table.md      also as a table for a document

gpu_cases.py holds the cases and the aims; gpu_peak.py measures the GPU's peaks in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu_cases
import gpu_measure
import torch

from selfattn_ext import bench
from selfattn_ext.bench import report, timer
from selfattn_ext.build import library
from selfattn_ext.terminal import CommandError, check_output, table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter runs")
    parser.add_argument("--json", metavar="FILE", help="also write the results here; - is standard output")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    parsed = parser.parse_args(arguments)
    try:
        return _run(parsed)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(parsed: argparse.Namespace) -> int:
    if not library.extension().build_info()["cuda"]:
        raise CommandError("this build of selfattn_ext has no CUDA kernels", exit_code=1)
    if not torch.cuda.is_available():
        raise CommandError("torch finds no GPU", exit_code=1)
    bench.check_json(parsed.json)
    if parsed.markdown is not None:
        check_output("--markdown", parsed.markdown, (".md",))
    session = gpu_measure.Session("cuda", timer.QUICK if parsed.quick else timer.FULL)
    rows = session.measure(gpu_cases.lines(parsed.quick))
    where = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}"
    header, cells = gpu_measure.cells(rows)
    parts = [where, table(header, cells, left=3), gpu_measure.notes(rows, session.meter.measured())]
    data = {
        **report.head(" ".join(["benchmarks/gpu_run.py", *sys.argv[1:]])),
        "gpu": torch.cuda.get_device_name(),
        "peaks": session.meter.measured(),
        "rows": [gpu_measure.row_data(row) for row in rows],
    }
    bench.emit("\n\n".join(parts), report.dump(data), parsed.json)
    if parsed.markdown is not None:
        lines = [header, ["---"] * len(header), *cells]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parsed.markdown.write_text(f"{where}\n\n{text}\n\n{parts[-1]}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
