"""A Python extension of C++ sources: how it is compiled, and how it is loaded."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder.jit import build_library, compiler_version, content_key


@dataclass(frozen=True)
class Extension:
    """What is to be built: a ``jit.Recipe``.

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

    @property
    def library(self) -> str:
        """File name of the module."""
        return f"{self.name}.so"

    def key(self) -> str:
        """Hash of sources, headers, flags, versions, compiler and kind of machine."""
        parts = [self.name, sysconfig.get_config_var("SOABI") or sys.version, *self.keys]
        parts += [*self.cxx_flags, *self.link_flags, compiler_version(self.compiler)]
        return content_key(parts, self.root, (".h", ".cpp"))

    def compile_commands(self, work: Path) -> list[list[str]]:
        """One a source."""
        return [
            [*self.compiler, *self.cxx_flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(self.sources, self._objects(work), strict=True)
        ]

    def link_commands(self, work: Path) -> list[list[str]]:
        """The link."""
        objects = map(str, self._objects(work))
        target = str(work / self.library)
        return [[*self.compiler, "-shared", *objects, *self.link_flags, "-o", target]]

    def fault(self, output: str) -> str | None:
        """None: what compiles may be used."""
        return None

    def fix(self, output: str) -> str:
        """By what the compiler said."""
        if "Python.h" in output:
            version = sysconfig.get_python_version()
            return f"install the header files of Python {version} (e.g. python{version}-dev)"
        if "std=c++" in output or "atomic_ref" in output:
            return "use a compiler with C++20 (GCC 10 or newer): set CXX to it"
        return "install a C++20 compiler that matches this torch (GCC 10 or newer), or set CXX"

    def _objects(self, work: Path) -> list[Path]:
        return [work / f"{number}-{path.stem}.o" for number, path in enumerate(self.sources)]


def load_extension(extension: Extension, *, verbose: bool = False) -> ModuleType:
    """Loads the extension, compiling it first if no process has done so.

    Args:
        extension: what to build.
        verbose: print each command.

    Raises:
        BuildError: compiling or loading failed, or the cache directory cannot be written.
    """
    name, library = extension.name, build_library(extension, verbose=verbose)
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
