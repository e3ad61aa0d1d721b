"""Files that a program is to write: looked at before any work starts. No torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo.options import InputError, wrong


def need_writable(
    files: Mapping[str, tuple[Path, Sequence[str]]], read: Mapping[str, Path] | None = None
) -> None:
    """Refuse, on every rank and before any work, what could not be written after it.

    Args:
        files: option -> the file that it names, and the endings that it may have ("" for none at
            all); no endings = any.
        read: option -> a file that is read, and so may not be written over.

    Raises:
        InputError: the name ends otherwise; it is a folder's; the file or the nearest folder that
            exists cannot be written; two options name the same file.
    """
    named: dict[Path, str] = {}
    for option, path in (read or {}).items():
        if path.is_file():
            named[path.resolve()] = option
    for option, (path, endings) in files.items():
        try:
            _need_one(option, path, endings)
            is_own = path.is_file() or not path.exists()  # /dev/null may be named twice
            first = named.setdefault(path.resolve(), option) if is_own else option
        except OSError as error:  # a name that is too long, a loop of links
            raise _refused(option, path, f"a file that can be written ({error.strerror})") from None
        if first != option:
            raise _refused(option, path, f"another file than that of {first}")


def make_folders(files: Mapping[str, tuple[Path, Sequence[str]]]) -> None:
    """Make the folders of ``files``, as of :func:`need_writable`; for the rank that writes.

    Raises:
        InputError: one cannot be made.
    """
    for option, (path, _) in files.items():
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(option, path, f"a folder that can be made ({error.strerror})") from None


def _need_one(option: str, path: Path, endings: Sequence[str]) -> None:
    if path.is_dir():
        fix = f"name a file in it: {option} {shlex.quote(str(path / 'NAME'))}"
        raise wrong(option, repr(str(path)), "a file that can be written, no folder", fix)
    if endings and path.suffix.lower() not in endings:
        known = [ending for ending in endings if ending]
        fix = f"{option} {shlex.quote(str(path.with_suffix(known[0])))}"
        raise wrong(option, repr(str(path)), f"a name that ends in {' or '.join(known)}", fix)
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise _refused(option, path, f"a folder where {str(folder)!r} is a file")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK | (os.X_OK if target.is_dir() else 0)):
        raise _refused(option, path, f"a file that can be written ({str(target)!r} cannot)")


def _refused(option: str, path: Path, wanted: str) -> InputError:
    return wrong(option, repr(str(path)), wanted, "name another file")
