"""The training text: documentation that is on any machine with Python."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import sysconfig
from pathlib import Path

# Not part of every installation, or not documentation of the library.
SKIPPED = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "distutils", "pydoc_data",
}  # fmt: skip
SHORTEST_DOCSTRING = 60


def training_text() -> bytes:
    """The standard library's dedented docstrings and pydoc's language topics, in a fixed order.

    The result depends on the Python version and on nothing else.

    Raises:
        RuntimeError: the library's source files are not installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    pieces: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            pieces += _docstrings(path)
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions ship it apart
        topics = {}
    pieces += [topics[name] for name in sorted(topics)]
    if not pieces:
        raise RuntimeError(f"no docstrings under {root}; train with a Python that ships its source")
    # A small model that has seen deep indentation answers one blank with blanks for ever.
    unique = dict.fromkeys(re.sub(" {5,}", " " * 4, piece.strip()) for piece in pieces)
    return ("\n\n".join(unique) + "\n").encode("utf-8")


def digest(text: bytes) -> str:
    """A short name of a text, for records."""
    return hashlib.sha256(text).hexdigest()[:16]


def _docstrings(path: Path) -> list[str]:
    """The docstrings of one file, in source order; none for a file that is not this Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    found = (ast.get_docstring(node) for node in nodes)
    return [text for text in found if text and len(text) >= SHORTEST_DOCSTRING]
