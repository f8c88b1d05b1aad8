"""Writes a refusal for every function of CUDA's runtime that the machine lacks. A refusal names its function.

python refusals.py LIBCUDART OUTPUT SOURCE...
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DEFINED = re.compile(r"^PTX_MACHINE_EXPORT [\w:* ]*?\b(\w+)\(", re.M)

HEAD = """// Written by refusals.py. The compiler sees other names, because it knows their signatures.
extern "C" int ptx_machine_refuse(const char* name);
"""
REFUSAL = """extern "C" __attribute__((visibility("default"))) int refused_{name}() __asm__("{name}");
int refused_{name}() {{ return ptx_machine_refuse("{name}"); }}
"""


def main(library: str, output: str, *sources: str) -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    exported = set(re.findall(r" T (\w+)@@", symbols.stdout))
    here = {name for source in sources for name in DEFINED.findall(Path(source).read_text(encoding="utf-8"))}
    text = HEAD + "".join(REFUSAL.format(name=name) for name in sorted(exported - here))
    Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
