"""What our op builders share: where the sources are, and how they answer DeepSpeed."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

from ds_tilemoe.errors import BuildError


def csrc_root() -> Path:
    """The C++ sources: inside the package in a wheel, beside it in a source checkout.

    Raises:
        BuildError: neither place holds them.
    """
    package = Path(__file__).resolve().parent.parent
    places = [package / "csrc", package.parent / "csrc"]
    for place in places:
        if (place / "plan_abi.h").is_file():
            return place
    raise BuildError(
        f"no C++ sources: got neither of {[str(place) for place in places]}; wanted plan_abi.h in "
        "one; fix: install ds_tilemoe again"
    )


class TileMoEBuilder(OpBuilder):
    """Base of our builders; stands in front of another builder class of DeepSpeed, if need be.

    Args:
        root: directory of the sources; None = those of the package.
    """

    NAME: str

    def __init__(self, root: Path | None = None) -> None:
        super().__init__(name=self.NAME)
        self._root = root

    @property
    def root(self) -> Path:
        """Directory of the C++ and CUDA sources."""
        return self._root or csrc_root()

    def absolute_name(self) -> str:
        """Name under which DeepSpeed would look for a prebuilt op; there is none."""
        return f"ds_tilemoe.op_builder.{self.NAME}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be built here. With ``verbose``, the reason is printed if not."""
        self.error_log = self._obstacle()
        if self.error_log and verbose:
            self.warning(self.error_log)
        return self.error_log is None

    def load(self, verbose: bool = False) -> Any:
        """The op, built if need be; once a process.

        Raises:
            BuildError: see the message for what is missing or the command that failed, and the fix.
        """
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self.jit_load(verbose)
        return OpBuilder._loaded_ops[self.name]

    @abstractmethod
    def _obstacle(self) -> str | None:
        """Why the op cannot be built here, with the fix; None if it can."""
        ...
