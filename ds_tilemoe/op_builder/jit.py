"""Builds a shared library from sources once per content, for any number of processes.

The cache is content addressed: all that goes into the result is in the key, so a directory is never
stale and no time stamp is compared. A build works in a directory of its own and moves the result
into place in one step, so a killed build leaves nothing that looks finished, and a compiler that
outlives it writes where nobody reads. torch.utils.cpp_extension.load would do neither: it waits for
ever on the lock file of a build that was killed.

A full disk, a crash or a copy can damage what lies in the cache, and to load a damaged library can
end the process without a word. So its size and digest lie beside it, moved into place with it, and
are compared before each load; what does not fit is built again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ds_tilemoe.errors import BuildError

logger = logging.getLogger("ds_tilemoe")

WAIT_NOTICE_S = 10.0  # after this long on another process's build we say whom we wait for
COMMAND_LIMIT_S = 900.0  # no single compile may hold the lock longer
ERROR_LINES = 12  # of the compiler's output in a BuildError


class Recipe(Protocol):
    """How one library is made.

    Attributes:
        name: of the op; its folder in the cache.
        library: file name of the result.
    """

    @property
    def name(self) -> str: ...

    @property
    def library(self) -> str: ...

    def key(self) -> str:
        """Hash of all that the result depends on; see content_key."""
        ...

    def compile_commands(self, work: Path) -> list[list[str]]:
        """Commands that write into ``work`` and do not depend on each other."""
        ...

    def link_commands(self, work: Path) -> list[list[str]]:
        """Commands that run after those, in order; the last writes ``work / library``."""
        ...

    def fault(self, output: str) -> str | None:
        """What is wrong with the output of a command that ended well; None if nothing is."""
        ...

    def fix(self, output: str) -> str:
        """What to do about a command that failed, or whose output has a fault."""
        ...


def content_key(parts: Sequence[str], root: Path, suffixes: Collection[str]) -> str:
    """Hash of ``parts``, the kind of machine, and the files below ``root`` with these suffixes."""
    digest = hashlib.sha256()
    for part in (*parts, platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in sorted(path for path in root.rglob("*") if path.suffix in suffixes):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]


def cache_root() -> Path:
    """``$TORCH_EXTENSIONS_DIR/ds_tilemoe`` if that is set, else ``~/.cache/ds_tilemoe``."""
    if base := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(base) / "ds_tilemoe"
    return Path("~/.cache/ds_tilemoe").expanduser()


def find_compiler() -> tuple[str, ...] | None:
    """The command of ``$CXX``, else the first of c++, g++ and clang++ on the path; None without."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for candidate in candidates:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise BuildError(f"CXX is {candidate!r} ({error}); fix: mend or unset it") from None
        if words and shutil.which(words[0]):
            return tuple(words)
    return None


def build_library(recipe: Recipe, *, verbose: bool = False) -> Path:
    """Path of the library, made first if no process has done so.

    Of any number of processes that call this at once, one builds; the others wait for it.

    Args:
        recipe: what to build.
        verbose: print each command.

    Raises:
        BuildError: a command failed, or the cache directory cannot be written.
    """
    home = cache_root() / recipe.name
    key = recipe.key()
    library = home / key / recipe.library
    if damage(library):
        try:
            home.mkdir(parents=True, exist_ok=True)
            with _build_lock(home / f"{key}.lock") as failure:
                if found := damage(library):
                    if os.path.lexists(library):
                        logger.warning("op %s: %s; it is built again", recipe.name, found)
                    _build_recorded(recipe, library, failure, verbose)
        except OSError as error:
            raise BuildError(
                f"op {recipe.name}: the build cache {str(home)!r} cannot be used ({error}); "
                "wanted a writable directory; fix: set TORCH_EXTENSIONS_DIR to one"
            ) from error
    return library


def damage(library: Path) -> str | None:
    """Why a library of the cache may not be loaded, as one line; None if it is as it was built.

    Reads all of it: some ms.
    """
    record = _record_of(library)
    try:
        recorded, found = record.read_text(), _fingerprint(library)
    except (OSError, ValueError) as error:
        return f"the cached library {str(library)!r} cannot be compared with its record ({error})"
    if found != recorded:
        return (
            f"the cached library {str(library)!r} is damaged: got {_shown(found)}; wanted "
            f"{_shown(recorded) or 'what is lost'}, as {record.name!r} says"
        )
    return None


def _shown(fingerprint: str) -> str:
    return " bytes with digest ".join(word[:12] for word in fingerprint.split()[:2])


def _record_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _fingerprint(library: Path) -> str:
    """Size in bytes and digest, as they are recorded."""
    with open(library, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{os.fstat(file.fileno()).st_size} {digest}\n"


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[_Failure]:
    """Holds ``path`` locked. flock goes with its process, so a lock is never stale."""
    began = time.time()
    noticed = False
    with open(path, "a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not noticed and time.time() - began > WAIT_NOTICE_S:
                    noticed = True
                    lock.seek(0)
                    logger.warning(
                        "op %s: waited %.0f s for %s, which is building it (lock %s)",
                        path.parent.name,
                        time.time() - began,
                        lock.read().strip() or "another process",
                        path,
                    )
                time.sleep(0.05)
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield _Failure(path.with_suffix(".failed"), began)


@dataclass(frozen=True)
class _Failure:
    """How a build failed, for those who waited for it: they need not try it again at once."""

    path: Path
    waiting_since: float

    def while_waiting(self) -> str | None:
        if self.path.exists() and self.path.stat().st_mtime > self.waiting_since:
            return self.path.read_text()
        return None


def _build_recorded(recipe: Recipe, library: Path, failure: _Failure, verbose: bool) -> None:
    """Builds under the lock, unless the build that this process waited for has just failed."""
    if message := failure.while_waiting():
        raise BuildError(message)
    failure.path.unlink(missing_ok=True)
    try:
        _build(recipe, library, verbose)
    except BuildError as error:
        failure.path.write_text(str(error))
        raise


def _build(recipe: Recipe, library: Path, verbose: bool) -> None:
    home, key = library.parent.parent, library.parent.name
    # Whoever left these is dead or past needing them: we hold the lock of this key.
    for leftover in home.glob(f"{key}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(library.parent, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{key}.part-", dir=home))
    try:
        with concurrent.futures.ThreadPoolExecutor(_jobs()) as pool:
            commands = recipe.compile_commands(work)
            done = [pool.submit(_run, recipe, command, work, verbose) for command in commands]
            try:
                for future in concurrent.futures.as_completed(done):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for command in recipe.link_commands(work):
            _run(recipe, command, work, verbose)
        for path in work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != library.name:
                path.unlink()
        _record_of(work / library.name).write_text(_fingerprint(work / library.name))
        work.chmod(0o755)
        work.rename(library.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _run(recipe: Recipe, command: Sequence[str], work: Path, verbose: bool) -> None:
    shown = shlex.join(command)
    if verbose:
        print(shown, flush=True)
    try:
        result = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(work)},  # what a killed compiler leaves goes with it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"op {recipe.name}: this command took more than {COMMAND_LIMIT_S:.0f} s and was ended: "
            f"{shown}; fix: see whether the machine is out of memory"
        ) from None
    except OSError as error:
        raise BuildError(
            f"op {recipe.name}: this command could not be started ({error}): {shown}; fix: see"
            " whether the machine is out of memory or processes"
        ) from error
    if result.returncode == 0:
        if fault := recipe.fault(result.stdout):
            raise BuildError(
                f"op {recipe.name}: this command's result may not be used: {shown}\n  {fault}\n"
                f"fix: {recipe.fix(result.stdout)}"
            )
        return
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line or "fatal" in line), 0)
    told = "\n  ".join(lines[first : first + ERROR_LINES]) or "(no output)"
    raise BuildError(
        f"op {recipe.name}: this command failed (exit {result.returncode}): {shown}\n  {told}\n"
        f"fix: {_common_fix(result) or recipe.fix(result.stdout)}"
    )


def _jobs() -> int:
    text = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"MAX_JOBS is {text!r}; wanted a number of at least 1; fix: unset it")
    return int(text)


def _common_fix(result: subprocess.CompletedProcess[str]) -> str | None:
    if result.returncode < 0 or "Killed" in result.stdout or "signal 9" in result.stdout:
        return "free memory or set MAX_JOBS=1"
    if "No space left" in result.stdout:
        return "make room on the disk of the build cache, or set TORCH_EXTENSIONS_DIR to another"
    return None


def compiler_version(compiler: Sequence[str]) -> str:
    """The command, and what it prints for ``--version``.

    Raises:
        BuildError: it does not run.
    """
    try:
        result = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"the compiler {shlex.join(compiler)!r} does not run ({error}); wanted a C++20 "
            "compiler; fix: install g++ or set CXX to a working one"
        ) from None
    return " ".join(compiler) + result.stdout
