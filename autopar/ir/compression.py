"""Lossy collectives of parameters that send 8-bit codes instead of numbers, used only where a user asks for them."""

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
    """The code of ZeRO's gathers of parameters ("int8" or "fp8") and of its sums of gradients ("int8"); "": exact.

    codegen/runtime/compressed.py has the error bounds.
    """

    gather: str = ""
    reduce: str = ""

    @classmethod
    def parse(cls, codes: Mapping[str, str] | Compression | None) -> Compression:
        """Read a mapping of collectives to codes. Raises ConstraintError with the legal values."""
        if isinstance(codes, Compression):
            return codes
        if codes is not None and not isinstance(codes, Mapping):
            raise ConstraintError("compression is a mapping", values=repr(codes), alternatives=LEGAL)
        for collective, code in (codes or {}).items():
            if not isinstance(code, str) or code not in CODES.get(collective, {}):
                raise ConstraintError(
                    "compression is not supported", values=f"{collective}: {code!r}", alternatives=LEGAL
                )
        return cls(**(codes or {}))

    @property
    def names(self) -> dict[str, str]:
        """Return the mapping that `parse` reads, without exact collectives."""
        return {name: code for name, code in (("gather", self.gather), ("reduce", self.reduce)) if code}

    def __bool__(self) -> bool:
        return bool(self.gather or self.reduce)

    def __str__(self) -> str:
        return ", ".join(f"{name} {code}" for name, code in self.names.items()) or "none"
