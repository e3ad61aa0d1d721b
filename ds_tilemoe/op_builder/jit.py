"""Compiles C++ sources into a Python extension, once per content, for any number of processes.

The cache is content addressed: all that goes into the result is in the key, so a directory is never
stale and no time stamp is compared. A build works in a directory of its own and moves the result
into place in one step, so a killed build leaves nothing that looks finished, and a compiler that
outlives it writes where nobody reads. torch.utils.cpp_extension.load would do neither: it waits for
ever on the lock file of a build that was killed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ds_tilemoe.errors import BuildError

logger = logging.getLogger("ds_tilemoe")

WAIT_NOTICE_S = 10.0  # after this long on another process's build we say whom we wait for
COMMAND_LIMIT_S = 900.0  # no single compile may hold the lock longer
ERROR_LINES = 12  # of the compiler's output in a BuildError


@dataclass(frozen=True)
class Extension:
    """What is to be built.

    Attributes:
        name: module name; the sources see it as TORCH_EXTENSION_NAME.
        root: directory of the sources; all .h and .cpp files below it enter the key.
        sources: the .cpp files to compile.
        compiler: the C++ compiler's command line, without flags.
        cxx_flags: flags of each compilation, include paths among them.
        link_flags: flags of the link.
        keys: anything else that the result depends on (versions).
    """

    name: str
    root: Path
    sources: tuple[Path, ...]
    compiler: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    keys: tuple[str, ...]

    def key(self) -> str:
        """Hash of sources, headers, flags, versions, compiler and kind of machine."""
        digest = hashlib.sha256()
        parts = [self.name, sysconfig.get_config_var("SOABI") or sys.version, *self.keys]
        parts += [
            *self.cxx_flags,
            *self.link_flags,
            _compiler_version(self.compiler),
            platform.machine(),
        ]
        for part in parts:
            digest.update(part.encode() + b"\0")
        files = (path for path in self.root.rglob("*") if path.suffix in (".h", ".cpp"))
        for path in sorted(files):
            digest.update(str(path.relative_to(self.root)).encode() + b"\0")
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
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return tuple(words)
    return None


def load_extension(extension: Extension, *, verbose: bool = False) -> ModuleType:
    """Loads the extension, compiling it first if no process has done so.

    Of any number of processes that call this at once, one compiles; the others wait for it.

    Args:
        extension: what to build.
        verbose: print each command.

    Raises:
        BuildError: compiling or loading failed, or the cache directory cannot be written.
    """
    home = cache_root() / extension.name
    key = extension.key()
    library = home / key / f"{extension.name}.so"
    if not library.exists():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with _build_lock(home / f"{key}.lock") as failure:
                if not library.exists():
                    _build_recorded(extension, library, failure, verbose)
        except OSError as error:
            raise BuildError(
                f"op {extension.name}: the build cache {str(home)!r} cannot be used ({error}); "
                "wanted a writable directory; fix: set TORCH_EXTENSIONS_DIR to one"
            ) from error
    return _import(extension.name, library)


def _import(name: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"op {name}: {str(library)!r} was built and does not load ({error}); wanted a library "
            f"for this Python and torch; fix: remove {str(library.parent)!r} and start again"
        ) from error
    return module


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


def _build_recorded(extension: Extension, library: Path, failure: _Failure, verbose: bool) -> None:
    """Builds under the lock, unless the build that this process waited for has just failed."""
    if message := failure.while_waiting():
        raise BuildError(message)
    failure.path.unlink(missing_ok=True)
    try:
        _build(extension, library, verbose)
    except BuildError as error:
        failure.path.write_text(str(error))
        raise


def _build(extension: Extension, library: Path, verbose: bool) -> None:
    home, key = library.parent.parent, library.parent.name
    # Whoever left these is dead or past needing them: we hold the lock of this key.
    for leftover in home.glob(f"{key}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(library.parent, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{key}.part-", dir=home))
    try:
        objects = [
            work / f"{number}-{path.stem}.o" for number, path in enumerate(extension.sources)
        ]
        commands = [
            [*extension.compiler, *extension.cxx_flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(extension.sources, objects, strict=True)
        ]
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
            done = [pool.submit(_run, extension.name, command, verbose) for command in commands]
            try:
                for future in concurrent.futures.as_completed(done):
                    future.result()
            except BuildError:
                pool.shutdown(cancel_futures=True)
                raise
        target = str(work / library.name)
        linked = [*extension.compiler, "-shared", *map(str, objects), *extension.link_flags]
        _run(extension.name, [*linked, "-o", target], verbose)
        for path in objects:
            path.unlink()
        work.chmod(0o755)
        work.rename(library.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _run(name: str, command: Sequence[str], verbose: bool) -> None:
    shown = shlex.join(command)
    if verbose:
        print(shown, flush=True)
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"op {name}: this command took more than {COMMAND_LIMIT_S:.0f} s and was ended: "
            f"{shown}; fix: see whether the machine is out of memory"
        ) from None
    if result.returncode == 0:
        return
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "error" in line or "fatal" in line), 0)
    told = "\n  ".join(lines[first : first + ERROR_LINES]) or "(no output)"
    killed = result.returncode < 0 or "Killed" in result.stdout
    fix = "free memory or set MAX_JOBS=1" if killed else _fix_of(result.stdout)
    raise BuildError(
        f"op {name}: this command failed (exit {result.returncode}): {shown}\n  {told}\nfix: {fix}"
    )


def _fix_of(output: str) -> str:
    if "Python.h" in output:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"install the header files of Python {version} (e.g. python{version}-dev)"
    if "No space left" in output:
        return "make room on the disk of the build cache, or set TORCH_EXTENSIONS_DIR to another"
    if "std=c++" in output or "atomic_ref" in output:
        return "use a compiler with C++20 (GCC 10 or newer): set CXX to it"
    return "install a C++20 compiler that matches this torch (GCC 10 or newer), or set CXX to one"


def _compiler_version(compiler: Sequence[str]) -> str:
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
