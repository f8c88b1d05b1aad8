"""Writes an assembly source that defines the instances of kernels that a build leaves out.

    python simulators/ptx_machine/missing_instances.py OUT OBJECTS...

Each function of the package's CUDA half that some object refers to and none defines gets a definition, which
goes to selfattn_missing_instance() of on_host/adapters.cpp.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: The function's name is the argument of the function that is called.
STUB = """.weak {name}
.hidden {name}
{name}: leaq 1f(%rip), %rdi
jmp selfattn_missing_instance
1: .string "{name}"
"""


def symbols(objects: list[str], *which: str) -> set[str]:
    listed = subprocess.run(["nm", *which, *objects], check=True, capture_output=True, text=True).stdout
    return {words[-1] for line in listed.splitlines() if len(words := line.split()) >= 2}


def main(out: str, *objects: str) -> None:
    given = list(objects)
    missing = symbols(given, "--undefined-only") - symbols(given, "--defined-only")
    own = sorted(name for name in missing if name.startswith("_ZN8selfattn4cuda"))
    text = "\n".join(
        [
            ".text",
            *map(STUB.format_map, ({"name": name} for name in own)),
            '.section .note.GNU-stack,"",@progbits',
            "",
        ]
    )
    Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
