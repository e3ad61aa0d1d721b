"""What the command lines of launch/ share: a parser, its types of values, one form of refusal.

Every refusal reads "thing: got ...; wanted ...; fix: ..." and ends the program with exit code 2, on
every rank; rank 0 speaks. No torch: a wrong command line is refused before it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from demo.process import BAD_INPUT, FAILED, complain, leave, rank, tell

MOST = 2**31 - 1  # of a number that is given; what counts rows or seeds holds as much


class InputError(ValueError):
    """An option, a file or a combination of them is wrong. Recover: the message names the fix."""


def wrong(thing: str, got: object, wanted: str, fix: str) -> InputError:
    """To be raised: ``thing`` is an option, a key or a file; the others are words or values."""
    return InputError(f"{thing}: {refusal(got, wanted, fix)}")


def refusal(got: object, wanted: str, fix: str) -> str:
    """The one form of an error message, without the thing it is about."""
    return f"got {got}; wanted {wanted}; fix: {fix}"


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Descriptions as they are written; options with the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """An argument parser that speaks once for all ranks, in the form of :func:`refusal`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A cut name is not the option: another one may come that begins alike.
        kwargs.setdefault("formatter_class", Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse's; what it does not know is answered with the nearest name that it does."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            odd = next((text for text in left if text.startswith("-")), left[0])
            fix = f"take it out; {self.prog} --help lists the options"
            if near := difflib.get_close_matches(odd.partition("=")[0], set(_names(self)), n=1):
                fix = f"write {near[0]}"
            self.error(f"{odd}: {refusal('no option of this name', 'one that there is', fix)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2, on every rank."""
        self.print_usage(sys.stderr)
        message = _reworded(message)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            leave(message)
        complain(message)
        sys.exit(BAD_INPUT)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        near = difflib.get_close_matches(str(value), map(str, action.choices), n=1)
        fix = f"write {near[0]}" if near else "choose one of them"
        wanted = f"one of {', '.join(map(str, action.choices))}"
        raise argparse.ArgumentError(action, refusal(repr(value), wanted, fix))

    def _print_message(self, message: str, file: Any = None) -> None:
        if rank() != 0 or not message:
            return
        if file is not sys.stdout:
            super()._print_message(message, file)
        elif not tell(message):
            sys.exit(FAILED)


def _names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Long options of a parser and of those below it, but for hidden ones."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _names(below)
        elif action.help != argparse.SUPPRESS:
            yield from (name for name in action.option_strings if name.startswith("--"))


def _reworded(message: str) -> str:
    """What argparse itself has to say, in our form."""
    thing, _, rest = message.removeprefix("argument ").partition(": ")
    if thing == "the following arguments are required":
        return f"{rest}: {refusal('nothing', 'one of them', 'see --help')}"
    if rest.startswith("expected "):
        count = rest.removeprefix("expected ")
        return f"{thing}: {refusal('too few or none', count, f'write it behind {thing}')}"
    if match := re.fullmatch("invalid (.+) value: (.*)", rest):
        return f"{thing}: {refusal(match[2], f'a value of type {match[1]}', 'change it')}"
    if match := re.fullmatch("ignored explicit argument (.*)", rest):
        return f"{thing}: {refusal(match[1], 'no value', 'leave the value out')}"
    return f"{thing}: {rest}" if rest else thing


# -- types of values --------------------------------------------------------------------------


def at_least(lowest: int, highest: int = MOST) -> Callable[[str], int]:
    """An argparse type: an integer from ``lowest`` to ``highest``; 1_000 is one."""

    def parse(text: str) -> int:
        value = _integer(text)
        if value is None or not lowest <= value <= highest:
            wanted = f"an integer from {lowest} to {highest}"
            raise argparse.ArgumentTypeError(refusal(repr(text), wanted, f"e.g. {lowest}"))
        return value

    return parse


def sizes(names: str, lowest: int = 1, highest: int = MOST) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: integers for each of ``names``, "M,N,K"; "..." = as many as one likes,
    each of them once."""
    count = None if names == "..." else len(names.split(","))
    wanted = f"integers from {lowest} to {highest}, {names if count else 'A,B,... without repeats'}"

    def parse(text: str) -> tuple[int, ...]:
        values = [_integer(word) for word in text.split(",")]
        known = [value for value in values if value is not None and lowest <= value <= highest]
        if len(known) != (count or len(values)) or len(known) != len(values):
            raise argparse.ArgumentTypeError(refusal(repr(text), wanted, "change it"))
        if count is None and len(set(known)) < len(known):
            raise argparse.ArgumentTypeError(refusal(repr(text), wanted, "name each once"))
        return tuple(known)

    return parse


def above_zero(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        wanted = "a finite number above 0"
        raise argparse.ArgumentTypeError(refusal(repr(text), wanted, "e.g. 0.001"))
    return value


def word(wanted: str) -> Callable[[str], str]:
    """An argparse type: text without blanks, and not empty; ``wanted`` says what it is."""

    def parse(text: str) -> str:
        if not text or len(text.split()) != 1 or text != text.strip():
            raise argparse.ArgumentTypeError(
                refusal(repr(text), wanted, "give one, or leave it out")
            )
        return text

    return parse


def _integer(text: str) -> int | None:
    """int() takes blanks and digits of other scripts, too, which nobody means; it has its own limit
    of digits, far above any number that is asked for."""
    if not re.fullmatch(r"[+-]?[0-9][0-9_]*", text):
        return None
    with contextlib.suppress(ValueError):
        return int(text.replace("_", ""))
    return None
