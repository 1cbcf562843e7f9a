"""Parameters, buffers and inputs by their global shapes and placements, and the base class of generated modules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from . import reshard
from .mesh import Mesh
from .rng_state import RngState

if TYPE_CHECKING:
    # Only programs that offload activations have it beside them.
    from .offload import Offload

ZERO_AXES = ("dp", "cp", "ep")
"""Axes over which ZeRO shards what is Rp on them, over both as one."""

Mode = Literal["none", "selective", "full"]
"""The parts of a layer that are recomputed in backward (`recompute.py`)."""

_FORM = re.compile(r"(R|Rp|P)|S\((\d+)(?:/(\d+))?\)")


@dataclass(frozen=True, slots=True, init=False)
class Param:
    """A tensor of the program: its global shape, how it lies on the mesh and what is stored of it.

    placements: axis name -> "R" (equal on all ranks, and so are its gradients; what an axis not named has), "Rp" (equal
    on all ranks, gradients are partial sums), "S(dim)" or "S(dim/sections)" (sharded).
    zero: 0 stores it whole; 1 shards the optimizer state over the axes of `ZERO_AXES` on which it is Rp; 2 the
    accumulated gradients too; 3 the parameter itself too, gathered for use. aliases: further names of the same tensor
    (tied weights). persistent: whether a buffer belongs to the state dict. increment: what every step adds to a buffer
    that counts forwards. padding: so many zeros follow each section of a dim, so that the ranks that share it have
    equally many; they stay zeros, since no gradient reaches them, and leave the program with no value that it gives.
    padded: the dim and its sections, as of a placement: "S(0)" is the end of all rows, "S(1/3)" of each third of a row.
    """

    shape: tuple[int, ...]
    placements: Mapping[str, str]
    zero: int
    aliases: tuple[str, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    increment: float
    padding: int
    padded: str

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        zero: int = 0,
        aliases: tuple[str, ...] = (),
        dtype: str = "float32",
        requires_grad: bool = True,
        persistent: bool = True,
        increment: float = 0,
        padding: int = 0,
        padded: str = "S(0)",
        **placements: str,
    ) -> None:
        kept = {axis: text for axis, text in placements.items() if text != "R"}
        for text in kept.values():
            parse_placement(text)
        tensor_dtype: torch.dtype = getattr(torch, dtype)
        requires_grad = requires_grad and (tensor_dtype.is_floating_point or tensor_dtype.is_complex)
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero}")
        if zero and requires_grad and not any(kept.get(axis) == "Rp" for axis in ZERO_AXES):
            lies = ", ".join(f"{axis} has {kept.get(axis, 'R')}" for axis in ZERO_AXES)
            raise ValueError(f"ZeRO shards over an Rp axis only, {lies}")
        _set(self, shape=tuple(shape), placements=kept, zero=zero, aliases=tuple(aliases), dtype=tensor_dtype)
        _set(self, requires_grad=requires_grad)
        _set(self, persistent=persistent, increment=increment, padding=padding, padded=padded)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape with its padding."""
        if not self.padding:
            return self.shape
        _, dim, sections = parse_placement(self.padded)
        return (*self.shape[:dim], self.shape[dim] + sections * self.padding, *self.shape[dim + 1 :])

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's part as the program uses it (gathered, under ZeRO-3).

        Raises ValueError if a sharded dim does not divide.
        """
        local = list(self.padded_shape)
        for axis, dim, sections in shards(self.placements, mesh):
            size = mesh.axis(axis).size
            if dim >= len(local) or local[dim] % (sections * size):
                raise ValueError(f"S({dim}/{sections}) over {axis}{size} does not divide shape {self.shape}")
            local[dim] //= size
        return tuple(local)


def _set(param: Param, **values: Any) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(param, name, value)


def parse_placement(text: str) -> tuple[str, int, int]:
    """ "S(1/3)" -> ("S", 1, 3), "Rp" -> ("Rp", -1, 1). ValueError with the legal forms."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"not a placement: {text!r}; write R, Rp, P, S(dim) or S(dim/sections)")
    kind, dim, sections = match.groups()
    return (kind, -1, 1) if kind else ("S", int(dim), int(sections or 1))


def shards(placements: Mapping[str, str], mesh: Mesh) -> list[tuple[str, int, int]]:
    """The (axis, dim, sections) that shard, in the order in which a whole tensor is cut.

    Where several axes shard one dim, the finest sections are cut first (that leaves the coarser ones whole), and
    of equal sections the first axis of the mesh.
    """
    order = [axis.name for axis in mesh.axes if axis.size > 1]
    parsed = ((axis, *parse_placement(placements[axis])) for axis in order if axis in placements)
    sharded = [(axis, dim, sections) for axis, kind, dim, sections in parsed if kind == "S"]
    return sorted(sharded, key=lambda entry: -entry[2])


def runs(dim: int, spec: Param, mesh: Mesh) -> list[tuple[int, int, int]]:
    """(local start, global start, length) of the runs of global indices that this rank holds of a dim."""
    size, cuts = spec.padded_shape[dim], [cut for cut in shards(spec.placements, mesh) if cut[1] == dim]
    if not cuts and not spec.padding:
        return [(0, 0, size)] if size else []
    index = torch.arange(size, device="cpu")
    for axis, _, sections in cuts:
        index = reshard.own_part(index, 0, sections, mesh.axis(axis))
    local = torch.arange(len(index), device="cpu")
    if spec.padding and parse_placement(spec.padded)[1] == dim:
        _, _, count = parse_placement(spec.padded)
        length = spec.shape[dim] // count
        section, place = index // (length + spec.padding), index % (length + spec.padding)
        local, index = local[place < length], (section * length + place)[place < length]
    breaks = torch.nonzero((index.diff() != 1) | (local.diff() != 1)).flatten() + 1
    bounds = [0, *breaks.tolist(), len(index)] if len(index) else []
    return [(int(local[lo]), int(index[lo]), hi - lo) for lo, hi in itertools.pairwise(bounds)]


def declared(root: type[Module]) -> Iterator[tuple[str, Param, tuple[str, ...]]]:
    """(name, spec, aliases) of every parameter of a root class, by full names."""
    yield from ((name, spec, spec.aliases) for name, spec in root.PARAMETERS.items())
    for cls, paths in root.LAYERS.items():
        for path, (name, spec) in itertools.product(paths, cls.PARAMETERS.items()):
            yield f"{path}.{name}", spec, tuple(f"{path}.{alias}" for alias in spec.aliases)


def classes_of(roots: Iterable[type[Module]]) -> Iterator[type[Module]]:
    """Yield root classes, and the classes of their layers."""
    for root in roots:
        yield from (root, *root.LAYERS)


def shard(tensor: Tensor, spec: Param | Mapping[str, str], mesh: Mesh) -> Tensor:
    """This rank's part of a whole tensor, contiguous (a view where that is one), with its share of the padding."""
    if isinstance(spec, Param) and spec.padding:
        _, dim, sections = parse_placement(spec.padded)
        zeros = tensor.new_zeros(*tensor.shape[:dim], spec.padding, *tensor.shape[dim + 1 :])
        tensor = torch.cat([part for section in tensor.chunk(sections, dim) for part in (section, zeros)], dim)
    for axis, dim, sections in shards(_placements(spec), mesh):
        tensor = reshard.own_part(tensor, dim, sections, mesh.axis(axis))
    return tensor.contiguous()


def unshard(local: Tensor, spec: Param | Mapping[str, str], mesh: Mesh) -> Tensor:
    """The whole tensor, from every rank's part: sharded axes gathered, partial ones ("P") summed. No gradient."""
    for axis, dim, sections in reversed(shards(_placements(spec), mesh)):
        local = reshard.gather(local, dim, sections, mesh.axis(axis))
    for name, text in _placements(spec).items():
        if text == "P":
            local = mesh.axis(name).sum_over(local)
    if isinstance(spec, Param) and spec.padding:
        _, dim, sections = parse_placement(spec.padded)
        length = spec.shape[dim] // sections
        parts = [local.narrow(dim, section * (length + spec.padding), length) for section in range(sections)]
        return parts[0] if sections == 1 else torch.cat(parts, dim)
    return local


def is_apart(spec: Param, mesh: Mesh) -> bool:
    """Whether `unshard` needs other ranks."""
    is_partial = any(text == "P" and mesh.axis(name).size > 1 for name, text in spec.placements.items())
    return bool(shards(spec.placements, mesh)) or is_partial


def _placements(spec: Param | Mapping[str, str]) -> Mapping[str, str]:
    return spec.placements if isinstance(spec, Param) else spec


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of a module tree: full name, spec, and every (module, attribute) that must hold it.

    unit: 0 for the root's own, then one per layer instance, in the order of LAYERS.
    """

    name: str
    aliases: tuple[str, ...]
    spec: Param
    unit: int
    places: tuple[tuple[nn.Module, str], ...]


def _one_each(values: tuple[Any, ...], cls: type[Module], paths: tuple[str, ...]) -> tuple[Any, ...]:
    if len(values) != len(paths):
        raise ValueError(f"{cls.__name__} has {len(paths)} instances, but the table {values}")
    return values


class Container(nn.Module):
    """A module on the way to a parameter; `self.linears[0]` is the child called "0"."""

    def __getitem__(self, name: int | str) -> Any:
        return member_of(self, str(name))


def member_of(module: nn.Module, name: str) -> Any:
    """The child, parameter or buffer of that name, which need not be an identifier or free of our own names."""
    for table in (module._modules, module._parameters, module._buffers):
        if name in table:
            return table[name]
    raise KeyError(f"{type(module).__name__} holds no {name!r}")


class Module(nn.Module):
    """Base of generated classes: the root of a program, and one class per kind of layer.

    Parameters are declared, not created: `ZeroUnits` (made by `Step`) allocates them and puts them in place, so that
    `self.self_attn.q_proj.weight` is the tensor that this rank computes with. Names are the user's own.

    PARAMETERS, BUFFERS: name (relative to the instance's path) -> Param. WRITTEN_BUFFERS: names of those that a forward
    in training changes. LAYERS (root only): class -> the paths of its instances in order of use. INPUTS (root only):
    what `forward` takes besides num_targets and sums, with the global shape of one micro-batch. ARGUMENTS (root only):
    the arguments of `forward` for inputs whose names generated code uses itself. UNUSED_INPUTS, FIXED_INPUTS (root
    only): what else a batch may hold, tensors that nothing depends on, and values that are no
    tensors and that the program was made with. GUARDS (root only): as `batch.Guards`. NO_EVALUATION (root only):
    why there is no evaluation mode, if there is none.
    RECOMPUTE, OFFLOAD (root only): class, a `recompute.MemorySaving` -> for each of its instances what becomes its
    attribute `recompute` ("none", "selective", "full") and `offload_activations`; none where a class is absent.
    RECEIVES, SENDS (root of a pipeline's stage only): tensors of earlier stages that `forward` takes, and the ones for
    later stages that it returns, in order; as INPUTS, placed on this stage's mesh (R and S only). FIRST_LAYER: class ->
    how many instances earlier stages have. JOINTS: what `Mesh.joint` is asked for. needs_first_pass: whether it is a
    `whole_sums.SummingModule`.
    """

    PARAMETERS: ClassVar[Mapping[str, Param]] = {}
    BUFFERS: ClassVar[Mapping[str, Param]] = {}
    WRITTEN_BUFFERS: ClassVar[tuple[str, ...]] = ()
    LAYERS: ClassVar[Mapping[type[Module], tuple[str, ...]]] = {}
    INPUTS: ClassVar[Mapping[str, Param]] = {}
    ARGUMENTS: ClassVar[Mapping[str, str]] = {}
    UNUSED_INPUTS: ClassVar[tuple[str, ...]] = ()
    FIXED_INPUTS: ClassVar[Mapping[str, Any]] = {}
    GUARDS: ClassVar[Mapping[str, tuple[Callable[[Mapping[str, torch.Tensor]], Any], Any]]] = {}
    NO_EVALUATION: ClassVar[str] = ""
    JOINTS: ClassVar[tuple[tuple[str, ...], ...]] = ()
    RECEIVES: ClassVar[Mapping[str, Param]] = {}
    SENDS: ClassVar[Mapping[str, Param]] = {}
    FIRST_LAYER: ClassVar[Mapping[type[Module], int]] = {}
    RECOMPUTE: ClassVar[Mapping[type[Module], tuple[Mode, ...]]] = {}
    OFFLOAD: ClassVar[Mapping[type[Module], tuple[bool, ...]]] = {}
    needs_first_pass: ClassVar[bool] = False

    def __init__(self, mesh: Mesh, rng: RngState | None = None, path: str = "", layer_index: int = 0) -> None:
        super().__init__()
        self.mesh = mesh
        self.rng = rng or RngState()
        self.path = path
        self.recompute: Mode = "none"
        self.offload_activations = False
        self.offload: Offload | None = None
        # Under the module's hooks, which then run once: ZeRO's gather parameters and watch the outputs.
        self.forward = self.wrapped(self.forward)
        self._layer_index = layer_index
        self._instances: dict[type[Module], tuple[Module, ...]] = {}
        for cls, paths in self.LAYERS.items():
            first = self.FIRST_LAYER.get(cls, 0)
            self._instances[cls] = tuple(self._add_layer(cls, p, index) for index, p in enumerate(paths, first))
        if self.RECOMPUTE or self.OFFLOAD:
            self._choose_memory()
        for name, spec in self.BUFFERS.items():
            owner, attribute = self._place(name)
            value = torch.empty(spec.local_shape(mesh), dtype=spec.dtype, device=mesh.device)
            owner._buffers[attribute] = value
        for name, spec in self.PARAMETERS.items():
            for alias in (name, *spec.aliases):
                owner, attribute = self._place(alias)
                owner._parameters[attribute] = None

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute of ours stays one beside a child that a user calls alike."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def __getitem__(self, name: int | str) -> Any:
        """Return a submodule whose name cannot be an attribute: `self[0]`, `self["mesh"]`."""
        return member_of(self, str(name))

    def held_values(self) -> Iterator[tuple[str, tuple[int, ...], Tensor | None]]:
        """The name of every parameter and buffer, the shape of all of it, and what is here."""
        for slot in self.slots():
            owner, attribute = slot.places[0]
            yield slot.name, slot.spec.shape, owner._parameters[attribute]
        yield from ((name, spec.shape, value) for name, spec, value in self.buffer_slots())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: copies and pickles would have hooks of this one, and under ZeRO-3 read memory that is
        freed."""
        raise TypeError(
            "a program's module is neither copied nor pickled: it has this rank's parts, and under ZeRO-3 not even "
            "those between steps. step.full_state_dict() on every rank gathers whole tensors, and "
            "program.update_model(step) puts them into the model that was compiled, which can be copied"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, where this rank has all of it. Raises RuntimeError elsewhere: under the
        names of whole tensors it would have parts, or freed memory."""
        for name, shape, value in self.held_values():
            if value is None or tuple(value.shape) != shape or value.untyped_storage().nbytes() < value.nbytes:
                raise RuntimeError(
                    f"step.model.state_dict() would not have all of {name} on this rank: "
                    "step.full_state_dict() on every rank gathers whole tensors"
                )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError: what the optimizer updates may be other tensors, on other ranks."""
        raise RuntimeError(
            "step.model.load_state_dict() does not reach what the optimizer updates: step.load(state), with whole "
            "tensors under the model's own names on every rank"
        )

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that is called in place of forward."""
        return forward

    def choose_memory(self, recompute: Mode, offload_activations: bool) -> None:
        """Set what this layer recomputes and whether its saved activations move to the host."""
        if recompute != "none" or offload_activations:
            raise ValueError(f"{type(self).__name__} recomputes and offloads nothing: it is no MemorySaving")

    def _choose_memory(self) -> None:
        for cls, paths in self.LAYERS.items():
            modes = _one_each(self.RECOMPUTE.get(cls, ("none",) * len(paths)), cls, paths)
            moves = _one_each(self.OFFLOAD.get(cls, (False,) * len(paths)), cls, paths)
            for layer, mode, offloads in zip(self._instances[cls], modes, moves, strict=True):
                layer.choose_memory(mode, offloads)

    def layers_of(self, cls: type[Module], start: int = 0, stop: int | None = None) -> tuple[Module, ...]:
        """The layer instances of that class in order, or a run of them."""
        return self._instances[cls][start:stop]

    def count_targets(self, **inputs: Tensor) -> list[Tensor]:
        """Valid targets of the global micro-batch, one 0-dim tensor per cross-entropy; generated where there is one.

        A class that overrides it takes their means over the micro-batches as `num_targets` in `forward`.
        """
        raise NotImplementedError

    def whole_sums(self, **inputs: Tensor) -> list[Tensor]:
        """Sums over the global micro-batch that depend on the batch alone; generated where forward needs them whole.

        A class that overrides it takes their sums over the micro-batches as `sums` in `forward`.
        """
        raise NotImplementedError

    @property
    def takes_sums(self) -> bool:
        """Whether `forward` takes sums."""
        return type(self).whole_sums is not Module.whole_sums

    @property
    def counts_targets(self) -> bool:
        """Whether `forward` takes num_targets."""
        return type(self).count_targets is not Module.count_targets

    def units(self) -> tuple[Module, ...]:
        """This module and its layer instances."""
        return (self, *(layer for layers in self._instances.values() for layer in layers))

    def slots(self) -> Iterator[Slot]:
        """Every parameter once, the root's first."""
        for unit, module in enumerate(self.units()):
            prefix = f"{module.path}." if module.path else ""
            for name, spec in module.PARAMETERS.items():
                places = tuple(module._place(tensor_name) for tensor_name in (name, *spec.aliases))
                yield Slot(
                    name=prefix + name,
                    aliases=tuple(prefix + alias for alias in spec.aliases),
                    spec=spec,
                    unit=unit,
                    places=places,
                )

    def buffer_slots(self) -> Iterator[tuple[str, Param, Tensor]]:
        """Every buffer's full name, spec and this rank's tensor."""
        for module in self.units():
            prefix = f"{module.path}." if module.path else ""
            for name, spec in module.BUFFERS.items():
                owner, attribute = module._place(name)
                yield prefix + name, spec, member_of(owner, attribute)

    def share_buffers(self, others: Mapping[str, Tensor]) -> None:
        """Take another program's buffers, by full names, in the places of those of equal shape and dtype."""
        for module in self.units():
            prefix = f"{module.path}." if module.path else ""
            for name in module.BUFFERS:
                (owner, attribute), other = module._place(name), others.get(prefix + name)
                buffer = member_of(owner, attribute)
                if other is not None and (other.shape, other.dtype) == (buffer.shape, buffer.dtype):
                    owner._buffers[attribute] = other

    def written_buffers(self) -> list[Tensor]:
        """This instance's own buffers that its forward in training changes."""
        places = (self._place(name) for name in self.WRITTEN_BUFFERS)
        return [member_of(owner, attribute) for owner, attribute in places]

    def _add_layer(self, cls: type[Module], path: str, index: int) -> Module:
        owner, attribute = self._place(path)
        layer = cls(self.mesh, self.rng, path, index)
        owner._modules[attribute] = layer
        return layer

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds `name` and the attribute's name, with containers made where they are missing."""
        owner: nn.Module = self
        *parents, attribute = name.split(".")
        for parent in parents:
            # Not by register_module, which refuses names that are attributes of ours: those are read by subscript.
            owner = owner._modules.setdefault(parent, Container()) or owner
        return owner, attribute
