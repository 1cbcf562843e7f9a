"""Which collectives of parameters move 8-bit codes instead of numbers: lossy, and so only where a user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ConstraintError
from codegen.runtime.codes import CODES, LEGAL

NOTHING_COMPRESSED = (
    "compression changes nothing: the plan shards no parameter with ZeRO over several ranks (the constraints zero=1, 2 "
    "or 3 with dp=2 or more ask for that)"
)


@dataclass(frozen=True, slots=True)
class Compression:
    """gather: of ZeRO's gathers of parameters, "int8" or "fp8"; reduce: of its sums of gradients, "int8"; "": exact.

    codegen/runtime/compressed.py has the error bounds.
    """

    gather: str = ""
    reduce: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, str] | Compression | None) -> Compression:
        """Raises ConstraintError with the legal values."""
        if isinstance(given, Compression):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConstraintError("compression is a mapping", values=repr(given), alternatives=LEGAL)
        for collective, code in (given or {}).items():
            if not isinstance(code, str) or code not in CODES.get(collective, {}):
                raise ConstraintError(
                    "compression is not supported", values=f"{collective}: {code!r}", alternatives=LEGAL
                )
        return cls(**(given or {}))

    @property
    def names(self) -> dict[str, str]:
        """The mapping that `parse` takes, without what is exact."""
        return {name: code for name, code in (("gather", self.gather), ("reduce", self.reduce)) if code}

    def __bool__(self) -> bool:
        return bool(self.gather or self.reduce)

    def __str__(self) -> str:
        return ", ".join(f"{name} {code}" for name, code in self.names.items()) or "none"
