"""Cases: functions that a rank test runs on every rank, and what became of them."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankContext:
    """Handed to each case: this rank, the number of ranks, a directory that all of them share."""

    rank: int
    world: int
    shared_dir: Path


@dataclass(frozen=True)
class Case:
    """A named function of a context."""

    name: str
    run: Callable[[RankContext], Any]


@dataclass(frozen=True)
class CaseResult:
    """What one case did on one rank: passed, or its traceback; and the value it returned."""

    name: str
    ok: bool
    error: str
    seconds: float
    value: Any = None


_CASES: dict[str, list[Case]] = {}  # resolved source file -> cases in order of definition


def case(function: Callable[..., Any] | None = None, **axes: Sequence[Any]) -> Any:
    """Registers ``function(ctx)`` as a case, or ``function(ctx, **values)`` once for each choice.

    A case runs on every rank and may return anything that JSON can hold. ``@case(k=[1, 2])`` makes
    two cases, ``name[k=1]`` and ``name[k=2]``.
    """
    if function is None:
        return functools.partial(case, **axes)
    cases = _CASES.setdefault(str(Path(function.__code__.co_filename).resolve()), [])
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        suffix = ",".join(f"{name}={value}" for name, value in chosen.items())
        name = f"{function.__name__}[{suffix}]" if chosen else function.__name__
        cases.append(Case(name, functools.partial(function, **chosen)))
    return function


def cases_in(path: Path) -> list[Case]:
    """The cases of a file, which is imported for it unless it has been; [] for a script without."""
    path = path.resolve()
    if str(path) not in _CASES and re.search(r"^@case\b", path.read_text(), re.MULTILINE):
        _CASES[str(path)] = []
        if str(path.parent) not in sys.path:  # as pytest does for a test file
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, f"{path} does not end in .py"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return _CASES.get(str(path), [])


def cases_of(source: str | Path) -> list[str]:
    """Names of the cases in a Python file, in the order in which they run."""
    return [entry.name for entry in cases_in(Path(source))]
