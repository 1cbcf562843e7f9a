"""Prices where linear layers multiply in e4m3 (`fp8=` of autopar.compile; codegen/passes/fp8.py says which).

With i bytes of an element of x (N x K), w (M x K) and y (N x M), on one rank, where n layers read one x,

    forward        fp8 product + casts of x, w          casts move  (i + 1) (NK / n + MK)
    gradient of x  fp8 product + casts of dy, w^T                   (i + 1) (NM + MK) + 2 i MK
    gradient of w  as without

Products run at the device's fp8 peak and read one byte per element. w^T is copied before it is cast; torch.addmm has
w^T in storage, and so copies in forward instead. n layers of one x are one call where x has one placement for all of
them. Each is charged its share of the cast, so that splitting them never seems to pay. A device without that peak (a
CPU) multiplies, in fp32, values decoded from the codes.

Bytes: layers keep x and w, as without fp8; codes and scales live for one product. With A elements of one factor, B of
the other and R of the result:

    GPU    cast of b  A + B + i B where b is copied              product  A + B + 4 (scales)
    CPU    cast of b  A + (5 + f) B                              product  A + B + 4 (scales) + max(4 (A + B + R), 8 R)

with f = 4 for a copy in fp32 where i < 4, else 0. Tensors that exist already, or not yet, are subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costs.rates import num_local_dim
from autopar.ir.graph import base_name
from autopar.ir.mesh import Mesh
from autopar.ir.placement import local_shape
from autopar.operators.traits import DEFERRABLE
from autopar.sharding.call_options import Operator, Option, num_local
from codegen.passes.fp8 import MULTIPLE


@dataclass(frozen=True, slots=True)
class CastBytes:
    """Bytes that casts move: of x and the weight in the forward, of y's gradient and the weight in the backward."""

    x: int
    weight: int
    gradient: int
    weight_again: int


@dataclass(frozen=True, slots=True)
class Product:
    """Elements of x (N K), weight (M K) and y (N M) on one rank, their inner lengths, and bytes of an element."""

    x: int
    weight: int
    y: int
    depth: int
    width: int
    is_addmm: bool
    has_bias: bool

    @property
    def rows(self) -> int:
        """Return the rows of x and y, N in the formulas above."""
        return self.x // self.depth

    @property
    def columns(self) -> int:
        """Return the columns of y, M in the formulas above."""
        return self.weight // self.depth

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that the forward's product reads and writes."""
        return self.x + self.weight + self.width * self.y

    @property
    def cast_bytes(self) -> CastBytes:
        """Return the bytes that casts move."""
        cast, copied = self.width + 1, 2 * self.width * self.weight
        return CastBytes(
            x=cast * self.x,
            weight=cast * self.weight + (copied if self.is_addmm else 0),
            gradient=cast * self.y,
            weight_again=cast * self.weight + (0 if self.is_addmm else copied),
        )

    def result_bytes(self, on_cpu: bool) -> float:
        """Return the bytes of the product before the bias is added, and on a CPU before scales are multiplied; 0 where
        it is y itself."""
        return float(self.width * self.y) if on_cpu or self.has_bias else 0.0

    def forward_temporary(self, on_cpu: bool) -> float:
        """Return the temporary bytes of the forward. y is not included: it counts from the start."""
        result_bytes = self.width * self.y
        scales = 4.0 * (self.rows + self.columns)
        casting = _cast(0, self.x, self.width, on_cpu), _cast(self.x, self.weight, self.width, on_cpu, self.is_addmm)
        multiplying = _multiply(self.x, self.weight, self.y, on_cpu) + scales
        adding = self.x + 2.0 * result_bytes if self.has_bias else 0.0
        return max(*casting, multiplying, self.x + self.weight + scales + result_bytes, adding) - result_bytes

    def backward_temporary(self, on_cpu: bool) -> float:
        """Return the temporary bytes of the backward until dx exists. dx and dw are not included: they count from the
        start."""
        dx, dw = self.width * self.x, self.width * self.weight
        scales = 4.0 * (self.rows + self.depth)
        casting = (
            _cast(0, self.y, self.width, on_cpu),
            _cast(self.y, self.weight, self.width, on_cpu, not self.is_addmm),
        )
        multiplying = _multiply(self.y, self.weight, self.x, on_cpu) + scales
        return max(max(*casting, multiplying, self.y + self.weight + scales + dx) - dx - dw, 0.0)


def _cast(num_bytes: int, elements: int, width: int, on_cpu: bool, copies: bool = False) -> float:
    """Return the bytes while a factor is cast, in addition to `held` codes of the other factor."""
    if on_cpu:
        return num_bytes + (5.0 + (4.0 if width < 4 else 0.0)) * elements
    return num_bytes + elements + (width * elements if copies else 0.0)


def _multiply(a: int, b: int, result: int, on_cpu: bool) -> float:
    """Return the bytes of codes and products; on a GPU without the result."""
    return a + b + (max(4.0 * (a + b + result), 8.0 * result) if on_cpu else 0.0)


@dataclass(frozen=True, slots=True)
class Fp8Layers:
    """The linear layers that multiply in e4m3.

    products: (scope, call) -> how many calls in e4m3 share its cast of x, of one program (emitted.py). None without
    a program: then an option alone says whether a call may be in e4m3.
    """

    products: Mapping[tuple[str, str], int] | None = None

    def has(self, operator: Operator, option: Option, mesh: Mesh) -> bool:
        """Return whether programs multiply this call in e4m3."""
        if self.products is not None:
            return (operator.scope, operator.node.name) in self.products
        position = DEFERRABLE.get(base_name(operator.node.op))
        if position is None or not operator.scope:
            return False
        shape = local_shape(operator.inputs[position].shape, option.inputs[position], mesh.sizes)
        return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)

    def num_sharing(self, operator: Operator) -> int:
        """Return how many calls share the cast of this call's x."""
        if self.products is not None:
            return self.products[operator.scope, operator.node.name]
        return num_sharing(operator)

    def product(self, operator: Operator, option: Option, mesh: Mesh) -> Product | None:
        """Return the sizes of a call in e4m3 on one rank; None for other calls."""
        if not self.has(operator, option, mesh):
            return None
        position = DEFERRABLE[base_name(operator.node.op)]
        metas = (operator.inputs[position - 1], operator.inputs[position], operator.node.outputs[0])
        places = (option.inputs[position - 1], option.inputs[position], option.outputs[0])
        x, weight, y = (num_local(meta, placements, mesh) for meta, placements in zip(metas, places, strict=True))
        is_addmm = position == DEFERRABLE["addmm"]
        return Product(
            x=x,
            weight=weight,
            y=y,
            depth=num_local_dim(metas[0], places[0], mesh),
            width=metas[2].dtype.itemsize,
            is_addmm=is_addmm,
            has_bias=is_addmm or len(operator.inputs) > position + 1,
        )


def num_sharing(operator: Operator) -> int:
    """Return how many layers of the call's scope read its x and may be one call with it, itself included."""
    if base_name(operator.node.op) != "linear" or operator.runs is None:
        return 1
    x = operator.node.inputs[0]
    readers = (node for node in operator.runs.readers[x] if base_name(node.op) == "linear" and node.inputs[0] == x)
    return max(sum(node.meta.shape[-1] % MULTIPLE == 0 for node in readers), 1)
