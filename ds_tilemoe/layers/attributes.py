"""What a module's forward may read beside its tensors, and what is hooked onto it.

The place of an attribute is a table, such as the ``__dict__`` of a module or of its class, and a
name in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

Place = tuple[Mapping[str, Any], str]

# Hooks of all modules of the process.
HOOKS_OF_ALL = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()

# Of a module's class: the functions that a call of the module goes through.
callees = attrgetter("forward", "__call__", "_call_impl")


def hooks_of(module: nn.Module) -> str:
    """Names of the functions that are hooked onto the module's forward; "" if none is."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)


def is_bookkeeping(name: str) -> bool:
    """Whether an attribute is torch's own, or that of a tool that marks its names (``__flops__``):
    nothing that a forward reads."""
    return name in OF_EVERY_MODULE or (name.startswith("__") and name.endswith("__"))


def class_places(kind: type[nn.Module]) -> Iterator[Place]:
    """Of methods and attributes of a user's class that its forward may use."""
    for table in _class_tables(kind):
        for name in table:
            if name != "forward" and not is_bookkeeping(name) and not name.startswith("_abc_"):
                yield table, name


def _class_tables(kind: type[nn.Module]) -> Iterator[Mapping[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing"):
            yield vars(base)


def is_cached(kind: type[nn.Module], name: str) -> bool:
    """Whether reading an attribute is what first puts it into the module."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return isinstance(found, functools.cached_property)


class Written(set[tuple[type, str]]):
    """What experts' forwards were seen to write: counts, statistics, caches; (class, name) of each.

    It is state, and no other value of it makes an expert another one. It holds for all modules of a
    class, so that ranks do not differ by which of their experts ran.

    An attribute that a forward writes and also computes its output with cannot be told from state:
    no change of it is seen from outside. An examination compares numbers as they are by then.
    """

    @contextmanager
    def by(self, expert: nn.Module) -> Iterator[None]:
        """Adds what is replaced, made or deleted in the expert's modules and classes meanwhile.

        The first value of a cached property is not: it is made once, and may then be watched.
        """
        modules = list(expert.modules())
        tables: list[tuple[type[nn.Module], Mapping[str, Any]]] = [
            (type(module), table)
            for module in modules
            for table in (vars(module), module._parameters, module._buffers)
        ]
        for kind in dict.fromkeys(map(type, modules)):
            tables += [(kind, table) for table in _class_tables(kind)]
        before = [dict(table) for _, table in tables]  # which also keeps ids from coming again
        try:
            yield
        finally:
            for (kind, table), old in zip(tables, before, strict=True):
                for name in old.keys() | table.keys():
                    is_same = old.get(name, _ABSENT) is table.get(name, _ABSENT)
                    is_first = name not in old and is_cached(kind, name)
                    if not (is_same or is_first or is_bookkeeping(name)):
                        self.add((kind, name))
