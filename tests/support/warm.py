"""Python processes that start with torch imported: forks of one that has done nothing else.

The import takes seconds. Only variables that are read later can differ between the forks: LD_PRELOAD, and
those of the C library and of OpenMP, need a process of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

#: A fork leaves the loop and executes its program at the end, as the interpreter would.
_SERVER = """
import json, os, signal, sys
import torch
for request in sys.stdin:
    process = os.fork()
    if process == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
folder, program, files, variables = json.loads(request)
for number, name in enumerate([os.devnull, *files]):
    os.dup2(os.open(name, os.O_RDWR), number)
signal.alarm(300)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
exec(compile(program, "<string>", "exec"))
"""


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER]
    server = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)
    return server


def variables(**more: str) -> dict[str, str]:
    """Returns the environment of a process outside the checkout, which imports the package that is tested."""
    found = find_spec("selfattn_ext")
    assert found is not None
    assert found.origin is not None
    path = [str(Path(found.origin).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def python(program: str, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder, with these variables and no others, like ``python -c``."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = [str(folder), program, [out.name, err.name], dict(variables)]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(program, code, out.read(), err.read())
