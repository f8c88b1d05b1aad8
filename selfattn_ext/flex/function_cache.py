"""The folder in which compiled functions of scores are kept for all processes.

It is SELFATTN_FUNCTION_CACHE, else selfattn_ext in XDG_CACHE_HOME or ~/.cache; if it cannot be written, a
temporary one serves this process. It may be deleted and its files may be damaged at any time: each ends in a
digest of its name and content, and a file that does not fit its digest counts as missing.
Loaders of libraries and GPUs ignore what follows the code, so that a file and its digest are one file, which
gets its name when it is complete.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
from pathlib import Path

__all__ = ["find", "read", "write"]

_VARIABLE = "SELFATTN_FUNCTION_CACHE"
_DIGEST_LENGTH = 64
_lock = threading.Lock()


def find(name: str) -> Path | None:
    """The file of a name, if it is there and holds what was written."""
    file = _folder() / name
    return file if _content(file) is not None else None


def read(name: str) -> bytes | None:
    """The content of the file of a name, if it is what was written."""
    return _content(_folder() / name)


def write(name: str, content: bytes) -> Path:
    """Keeps a content under a name; processes that write or read the same name at once do no harm.

    Raises:
        OSError: neither the folder nor a temporary one can be written.
    """
    try:
        return _write(_folder() / name, content)
    except OSError:  # the disk is full, or the folder has been deleted since
        return _write(_temporary_folder() / name, content)


def _content(file: Path) -> bytes | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    content = data[:-_DIGEST_LENGTH]
    return content if data[-_DIGEST_LENGTH:] == _digest(file.name, content) else None


def _write(file: Path, content: bytes) -> Path:
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="making_") as folder:
        made = Path(folder, file.name)
        made.write_bytes(content + _digest(file.name, content))
        os.replace(made, file)
    return file


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + content).hexdigest().encode()


def _folder() -> Path:
    """The folder, which is made again whenever it is needed, as anybody may delete it."""
    wanted = _wanted()
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=wanted):
                return wanted
        except OSError:
            pass
    return _temporary_folder()


def _wanted() -> Path | None:
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return _absolute(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG_CACHE_HOME has relative paths ignored.
    return _absolute(os.path.join(base if os.path.isabs(base) else "~/.cache", "selfattn_ext"))


@functools.cache
def _absolute(folder: str) -> Path | None:
    """The same folder from the first use on, wherever the process goes; None if no home is known."""
    try:
        return Path(folder).expanduser().absolute()
    except (OSError, RuntimeError):
        return None


def _temporary_folder() -> Path:
    with _lock:  # functools.cache would let two threads make a folder each
        folder = Path(_temporary_of_process().name)
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _temporary_of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="selfattn_ext_")
