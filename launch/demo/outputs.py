"""Files that a program is to write: looked at before any work, and written whole. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from demo.options import InputError, refusal, wrong


class OutputError(Exception):
    """A file could not be written after the work: a full disk, say. What was there before, is."""


def need_writable(
    files: Mapping[str, tuple[Path, Sequence[str]]],
    read: Mapping[str, Path] | None = None,
    appended: Collection[str] = (),
) -> None:
    """Refuse, on every rank and before any work, what could not be written after it.

    Args:
        files: option -> the file that it names, and the endings that it may have ("" for none at
            all); no endings = any.
        read: option -> a file that is read, and so may not be written over.
        appended: options whose file is appended to; others are written beside and renamed.

    Raises:
        InputError: the name ends otherwise; it is a folder's; the file cannot be written; in its
            folder, or the nearest one that exists, no file can be made; two options name the same
            file.
    """
    named: dict[Path, str] = {}
    for option, path in (read or {}).items():
        if path.is_file():
            named[path.resolve()] = option
    for option, (path, endings) in files.items():
        try:
            _need_one(option, path, endings, option in appended)
            is_own = path.is_file() or not path.exists()  # /dev/null may be named twice
            first = named.setdefault(path.resolve(), option) if is_own else option
        except (OSError, RuntimeError) as error:  # a name that is too long, a loop of links
            why = getattr(error, "strerror", None) or error
            raise _refused(option, path, f"a file that can be written ({why})") from None
        if first != option:
            raise _refused(option, path, f"another file than that of {first}")


def make_folders(files: Mapping[str, tuple[Path, Sequence[str]]]) -> None:
    """Make the folders of ``files``, as of :func:`need_writable`; for the rank that writes.

    Raises:
        InputError: one cannot be made.
    """
    for option, (path, _) in files.items():
        try:
            path.resolve().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(option, path, f"a folder that can be made ({error.strerror})") from None


@contextlib.contextmanager
def whole_file(option: str, path: Path) -> Iterator[Path]:
    """Where to write the file of ``option``: beside it, and renamed once it is whole.

    Yields:
        A path of the same ending; a device is written where it is.

    Raises:
        OutputError: it cannot be written; ``path`` is then as it was.
    """
    is_own = path.is_file() or not path.exists()
    target = path.resolve() if is_own else path  # a link stays one
    beside = target.with_name(f".{os.getpid()}.part{target.suffix}") if is_own else path
    try:
        yield beside
        if is_own:
            if target.exists():
                shutil.copymode(target, beside)
            os.replace(beside, target)
    except OSError as error:
        raise _unwritten(option, path, error) from error
    finally:
        if is_own:
            with contextlib.suppress(OSError):
                beside.unlink()


def append_whole(option: str, path: Path, text: str) -> None:
    """Append ``text`` to the file of ``option``, all of it or nothing.

    Raises:
        OutputError: it cannot be written; the file is then as it was, or not there.
    """
    data, existed = text.encode(), path.exists()
    try:
        with path.open("ab", buffering=0) as file:
            is_own = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if is_own:
                with contextlib.suppress(OSError):  # a file system may have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # nobody's line is cut off with ours
            before = os.fstat(file.fileno()).st_size
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                if is_own:
                    os.fsync(file.fileno())  # some file systems tell of a full disk only here
            except OSError:
                if is_own:
                    file.truncate(before)
                    if not existed and not before:
                        path.unlink()
                raise
    except OSError as error:
        raise _unwritten(option, path, error) from error


def _need_one(option: str, path: Path, endings: Sequence[str], appended: bool) -> None:
    if path.is_dir():
        fix = f"name a file in it: {option} {shlex.quote(str(path / 'NAME'))}"
        raise wrong(option, repr(str(path)), "a file that can be written, no folder", fix)
    if endings and path.suffix.lower() not in endings:
        known = [ending for ending in endings if ending]
        fix = f"{option} {shlex.quote(str(path.with_suffix(known[0])))}"
        raise wrong(option, repr(str(path)), f"a name that ends in {' or '.join(known)}", fix)
    folder = path.resolve().parent  # a link stays one, so what it names is made
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise _refused(option, path, f"a folder where {str(folder)!r} is a file")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK | (os.X_OK if target.is_dir() else 0)):
        raise _refused(option, path, f"a file that can be written ({str(target)!r} cannot)")
    if path.is_file() and appended:
        path.open("ab").close()
    elif path.is_file() or not path.exists():
        # Some folders, as those of /proc, take no file whatever their permissions say.
        tempfile.TemporaryFile(dir=folder).close()


def _refused(option: str, path: Path, wanted: str) -> InputError:
    return wrong(option, repr(str(path)), wanted, "name another file")


def _unwritten(option: str, path: Path, error: OSError) -> OutputError:
    got = f"{str(path)!r} ({error.strerror or error})"
    fix = "make room there or name another file"
    return OutputError(f"{option}: {refusal(got, 'a file that can be written', fix)}")
