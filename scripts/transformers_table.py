"""Tables of how every architecture of the installed transformers is supported.

    python scripts/transformers_table.py              # tests all, and writes docs/transformers.md
    python scripts/transformers_table.py bert llama   # prints one line on each of these, writes nothing

It writes the tables between the marks of the page. Each architecture is built small, with random weights, and
compared with itself on "eager", as in tests/clients/test_transformers_zoo.py. A process that hangs or dies is
replaced by another one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "transformers-architectures.md"
BEGIN, END = "<!-- begin: scripts/transformers_table.py -->", "<!-- end: scripts/transformers_table.py -->"
SECONDS = 180
OUTCOMES = {
    "served": 'Served: every attention by these kernels, all results equal to those of "eager"',
    "in part": "Served in part: equal, but the model computes some attention itself, or loses some weights",
    "refused": "Refused by a ValueError",
    "eager": 'Take the name, and compute all attention themselves, as with "eager"',
    "no attention": "Have no attention",
    "wrong": "Wrong",
    "crash": "Fail",
    "not built": "Not built",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_type", nargs="*", help="only these, printed")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    sys.path[:0] = [str(ROOT / "tests" / "clients"), str(ROOT)]
    if given.serve:
        return serve()
    import conftest  # noqa: F401  (lets torchvision be imported)
    import zoo_models

    verdicts = walked(given.model_type or zoo_models.architectures(), given.workers)
    if given.model_type:
        print("\n".join(one["line"] for one in verdicts))
    else:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{tables(verdicts)}\n{END}{after}", encoding="utf-8")
    return int(any(one["outcome"] in ("wrong", "crash") for one in verdicts))


def serve() -> int:
    """Prints a line of JSON on standard output for each model type on standard input."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import dataclasses

    import conftest  # noqa: F401
    import torch
    import zoo_judge

    torch.set_num_threads(1)
    for line in sys.stdin:
        verdict = zoo_judge.judged(line.strip())
        print(json.dumps({**dataclasses.asdict(verdict), "line": verdict.line()}), file=out, flush=True)
    return 0


def walked(model_types: list[str], workers: int) -> list[dict[str, Any]]:
    waiting: queue.Queue[str] = queue.Queue()
    for model_type in model_types:
        waiting.put(model_type)
    verdicts: dict[str, dict[str, Any]] = {}

    def work() -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                model_type = waiting.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, __file__, "--serve"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(SECONDS, process.kill)
            timer.start()
            print(model_type, file=process.stdin, flush=True)
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                process.wait()
                process = None
                line = json.dumps(
                    {"model_type": model_type, "outcome": "crash", "line": f"{model_type} died", "notes": []}
                )
            verdicts[model_type] = json.loads(line)
            print(f"\r{len(verdicts)} of {len(model_types)} ", end="", file=sys.stderr, flush=True)
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [verdicts[model_type] for model_type in model_types]


def tables(verdicts: list[dict[str, Any]]) -> str:
    import torch
    import transformers

    today = datetime.date.today().isoformat()
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}, {today}: "
        f"`python scripts/transformers_table.py`",
        "",
        "| outcome | architectures |",
        "|---|---|",
    ]
    groups = {outcome: [one for one in verdicts if one["outcome"] == outcome] for outcome in OUTCOMES}
    lines += [f"| {OUTCOMES[outcome]} | {len(group)} |" for outcome, group in groups.items() if group]
    for outcome, group in groups.items():
        if not group or outcome == "not built":
            continue
        lines += ["", f"<details><summary>{OUTCOMES[outcome].partition(':')[0]}</summary>", ""]
        lines += [", ".join(f"`{one['model_type']}`" for one in group), "", "</details>"]
    if groups["not built"]:
        lines += ["", "<details><summary>Not built, and why</summary>", ""]
        lines += [f"- `{one['model_type']}`: {reason(one)}" for one in groups["not built"]]
        lines += ["", "</details>"]
    return "\n".join(lines)


def reason(verdict: dict[str, Any]) -> str:
    """Returns the first reason, short, without characters that break the page."""
    first = (verdict["notes"] or ["nothing to compare"])[0].split(" // ")[0].split(" / ")[0]
    return re.sub(r"[`|<>*]", "", first)[:140].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
