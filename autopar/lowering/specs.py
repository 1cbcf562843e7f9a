"""Specs of the tensors that a program stores, receives and sends: shape, dtype and placement per axis."""

from __future__ import annotations

from autopar.ir.graph import Graph, Parameter, Ref, TensorMeta, unread
from autopar.ir.placement import Placements, R, S, Stored
from autopar.lowering.scope_lowering import Shared, dtype_name, placement_pairs
from autopar.sharding.call_options import num_local
from codegen.program import BoundaryTensor, Spec


def spec_of(shared: Shared, scope: str, parameter: Parameter) -> Spec:
    """Return the spec of a stored parameter or buffer of a scope."""
    stored = shared.assignment.parameters.get((scope, parameter.name), Stored((R,) * len(shared.mesh.axes)))
    return Spec(
        shape=_own_shape(parameter),
        dtype=_stored_dtype(parameter),
        placements=placement_pairs(stored.placements, shared.mesh),
        zero=stored.zero,
        aliases=parameter.aliases,
        requires_grad=parameter.meta.requires_grad,
        persistent=parameter.persistent,
        increment=parameter.increment,
        padding=parameter.padding,
        padded=str(S(parameter.padded_dim, parameter.padded_sections)),
    )


def unread_specs(graph: Graph) -> dict[str, Spec]:
    """Return the specs of tensors that no call reads: they keep their values and belong to the state."""
    return {
        p.name: Spec(
            p.meta.shape, dtype_name(p.meta.dtype), aliases=p.aliases, requires_grad=False, increment=p.increment
        )
        for p in unread(graph)
    }


def _own_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of the user's tensor, without padding."""
    if not parameter.padding:
        return parameter.meta.shape
    shape = list(parameter.meta.shape)
    shape[parameter.padded_dim] -= parameter.padding * parameter.padded_sections
    return tuple(shape)


def _stored_dtype(parameter: Parameter) -> str:
    """Return the stored dtype: fp32 for trained half-precision parameters, of which ranks compute with a copy."""
    is_master = parameter.meta.requires_grad and parameter.meta.dtype.itemsize < 4
    return "float32" if is_master else dtype_name(parameter.meta.dtype)


def input_spec(shared: Shared, name: str, meta: TensorMeta) -> Spec:
    """Return the spec of an input of forward: of the batch, or of an earlier stage."""
    pairs = placement_pairs(shared.assignment.tensors["", Ref(name)], shared.mesh)
    return Spec(meta.shape, dtype_name(meta.dtype), pairs, requires_grad=False)


def border_of(shared: Shared, meta: TensorMeta, placements: Placements) -> BoundaryTensor:
    """Return the spec of a tensor that crosses between stages."""
    pairs = placement_pairs(placements, shared.mesh)
    spec = Spec(meta.shape, dtype_name(meta.dtype), pairs, requires_grad=meta.requires_grad)
    return BoundaryTensor(spec, num_local(meta, placements, shared.mesh) * meta.dtype.itemsize)
