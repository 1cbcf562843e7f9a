"""Live tensors while one unit runs forward and backward, operator by operator, on one rank.

Generated code keeps the results of a function's calls in local variables until it returns. Autograd keeps a saved
tensor until the backward of the call that is first to keep it. Backward, calls run in reverse: a call's incoming
gradients live until its outgoing ones exist. Gradients of a tensor with several readers are added up in place if
nothing else refers to them; views and additions pass their gradient on without a copy. Sizes of temporaries inside a
call follow from torch's formulas (`derivatives.yaml`) and from `codegen/runtime`; each comment names the function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.costs.allocations import Gradients, Variables
from autopar.costs.events import Event, Key, Moved, Ran, Unit
from autopar.costs.kept import is_view
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.saved import Saved
from autopar.ir.draws import DRAW
from autopar.ir.graph import Ref, TensorMeta, base_name, has_dropout
from autopar.ir.placement import Placements
from autopar.operators.traits import DEFERRABLE, JOINS, PARTS, VIEWS
from autopar.sharding.call_options import num_local
from autopar.sharding.scopes import Scope

HANDED_ON = VIEWS - PARTS | JOINS | {"contiguous", "clone", "add", "sub"}
"""Operators that pass on the gradient, or a view of it, in backward if shapes and dtypes are equal."""

BACKWARD_TEMPORARIES: Mapping[str, int] = {"pow": 1, "rsqrt": 2, "sqrt": 1, "div": 1}
"""Tensors of the input's size that the backward allocates beyond its result. pow: n x^(n-1); rsqrt: y^3, -g/2."""

DROPOUT_PAIRS = {"cpu": 1 << 15, "gpu": 1 << 22}
CROSS_ENTROPY_ELEMENTS = {"cpu": 1 << 18, "gpu": 1 << 26}
"""Elements of a chunk of temporaries (dropout.py `_fill_keep`: 24 bytes a pair; cross_entropy.py: fp32)."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes while a unit runs, in addition to those that earlier units keep.

    kept: for the backward. loose: results that nothing keeps, alive until the forward returns. forward: at the
    forward's end and peak. again: of a recomputed forward in backward, up to the last kept tensor. backward: at the
    backward's peak; waiting: the same if gradients of parameters stay; deferring: the same if gradients of linear
    layers are deferred, with `deferred` bytes alive until then. weight: the largest gradient of a parameter.
    entering, leaving: gradients of the unit's inputs and of its results.
    """

    kept: float = 0.0
    loose: float = 0.0
    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    deferring: float = 0.0
    deferred: float = 0.0
    weight: float = 0.0
    entering: float = 0.0
    leaving: float = 0.0


class Walk:
    """The events of one unit in order. scope: of its calls. saved: the allocations that each call is first to keep
    (`saved_tensors`). The results of passing calls are freed when the next other call returns."""

    def __init__(
        self,
        scope: Scope,
        unit: Unit,
        pricer: Pricer,
        saved: Mapping[str, tuple[Saved, ...]],
        parameters: frozenset[str],
    ) -> None:
        self.scope, self.events, self.ends, self.rebound = scope, unit.events, unit.ends, unit.rebound
        self.pricer = pricer
        self.parameters, self.kind = parameters, "cpu" if is_cpu(pricer.cluster) else "gpu"
        self.scale = 1.0 + pricer.rates.fragmentation
        self.ran = tuple(event for event in self.events if isinstance(event, Ran))
        self.roots: dict[Key, Key] = {}
        self.gathered: dict[Key, Placements] = {}
        for event in self.events:
            self._find_roots(event)
        self.kept = {ran.name: self._kept(ran, saved.get(ran.name, ())) for ran in self.ran}
        self.kept_bytes = sum(size for parts in self.kept.values() for _, size in parts)

    def _find_roots(self, event: Event) -> None:
        """Find the notes with an allocation that a view or a free reshard shares. A tensor that will be gathered again
        stands for its shard, which is kept instead."""
        if isinstance(event, Moved):
            is_gathered = self.pricer.gathers_again and any(step.forward == "all_gather" for step in event.path)
            if event.is_free or is_gathered:
                self.roots[event.ref, event.target] = self._root(event.ref, event.source)
            if is_gathered:
                self.gathered[event.ref, event.target] = event.source
            return
        node, option = event.operator.node, event.option
        if is_view(node):
            root = self._root(node.inputs[0], option.inputs[0])
            self.roots |= {(Ref(node.name, i), placements): root for i, placements in enumerate(option.outputs)}

    def _root(self, ref: Ref, placements: Placements) -> Key:
        """Return the allocation behind a view."""
        return self.roots.get((ref, placements), (ref, placements))

    def _bytes(self, meta: TensorMeta, placements: Placements) -> float:
        return num_local(meta, placements, self.pricer.mesh) * meta.dtype.itemsize * self.scale

    def _kept(self, ran: Ran, saved: tuple[Saved, ...]) -> list[tuple[Key | None, float]]:
        """Return (storage, bytes) of the allocations that a call is first to keep. None: the call creates the tensor
        itself."""
        node, option = ran.operator.node, ran.option
        sizes: list[tuple[Key | None, float]] = []
        for ref, num_bytes in saved:
            is_result = ref.node == node.name
            placements = option.outputs[ref.index] if is_result else option.inputs[node.inputs.index(ref)]
            kept_as = self.gathered.get((ref, placements), placements)
            meta = self.scope.metas[ref]
            share = num_local(meta, kept_as, self.pricer.mesh) / max(meta.numel, 1)
            sizes.append((self._root(ref, placements), share * num_bytes * self.scale))
        if any(meta.requires_grad for meta in node.outputs):
            local = num_local(node.outputs[0], option.outputs[0], self.pricer.mesh)
            extra = self.pricer.made_bytes(ran.operator, option)
            extra += self.pricer.window_bytes(ran.operator, ran.option, local)
            extra += self.pricer.kernel_bytes(ran.operator, option)[0]
            sizes.append((None, extra * self.scale))
        return sizes

    # Forward ----------------------------------------------------------------------------------------------------------

    def measure(self) -> Liveness:
        """Return all figures of the walk."""
        loose, peak, again = self._forward()
        backward, _, entering = self._backward()
        waiting, _, _ = self._backward(waits=True)
        deferring, deferred, _ = self._backward(defers=True)
        weight = max((size for ran in self.ran for size in self._weights(ran)), default=0.0)
        leaving = sum(self._bytes(self.scope.metas[r], p) for r, p in self.ends if self.scope.metas[r].requires_grad)
        return Liveness(
            kept=self.kept_bytes,
            loose=loose,
            forward=peak,
            again=again,
            backward=backward,
            waiting=waiting,
            deferring=deferring,
            deferred=deferred,
            weight=weight,
            entering=entering,
            leaving=leaving,
        )

    def _forward(self) -> tuple[float, float, float]:
        """Return the bytes of a forward alone: (loose, peak, peak of a second forward)."""
        storages = {key for parts in self.kept.values() for key, _ in parts if key is not None}
        savers = [ran.name for ran in self.ran if any(size for _, size in self.kept[ran.name])]
        last = savers[-1] if savers else ""
        variables = Variables()
        kept = peak = again = 0.0
        saved_before: set[Key] = set()
        passing: list[Key] = []
        for event in self.events:
            sizes, temporary = self._new_bytes(event), self._forward_temporary(event)
            if event.name == last and isinstance(event, Ran):
                again = max(peak, kept + variables.total + sum(size for _, size in self.kept[last]))
            for key, size in sizes.items():
                if key in storages:
                    kept += size
                    saved_before.add(key)
                else:
                    variables.add(key, size)
            if isinstance(event, Ran):
                # Inputs that the unit keeps, and tensors that a call creates for its backward.
                kept += sum(size for key, size in self.kept[event.name] if key is None or key not in saved_before)
                saved_before |= {key for key, _ in self.kept[event.name] if key is not None}
            peak = max(peak, kept + variables.total + temporary)
            for name, (ref, placements) in event.names:
                variables.assign(name, self._root(ref, placements))
            if isinstance(event, Ran) and event.is_passing:
                passing += sizes
            elif isinstance(event, Ran):
                variables.drop_unnamed(passing)
                passing = []
        variables.forget(self.rebound)
        return variables.total, peak, again

    def _new_bytes(self, event: Event) -> dict[Key, float]:
        """Return new allocations by storage."""
        if isinstance(event, Moved):
            sizes = {(event.ref, event.target): self._bytes(self.scope.metas[event.ref], event.target)}
            return {} if event.is_free or sizes.keys() <= self.gathered.keys() else sizes
        node = event.operator.node
        if is_view(node):
            return {}
        return {
            (Ref(node.name, i), where): self._bytes(meta, where)
            for i, (meta, where) in enumerate(zip(node.outputs, event.option.outputs, strict=True))
        }

    def _forward_temporary(self, event: Event) -> float:
        if isinstance(event, Moved):
            return self._copies(event) + self._again([(event.ref, event.target)])
        node, option = event.operator.node, event.option
        name, local = base_name(node.op), num_local(node.outputs[0], option.outputs[0], self.pricer.mesh)
        if name == "dropout":
            return 24.0 * min(local // 2, DROPOUT_PAIRS[self.kind]) * self.scale
        if node.op == DRAW:  # of 64-bit integers as in dropout, one per element, and their results
            return 40.0 * min(local, DROPOUT_PAIRS[self.kind]) * self.scale
        if name == "cross_entropy_loss":
            return self._chunk(event)
        in_kernel = self.pricer.kernel_bytes(event.operator, option)[1]
        return self._probabilities(event) + self._exchanged(event)[0] + in_kernel * self.scale

    def _exchanged(self, ran: Ran) -> tuple[float, float]:
        """Return the bytes of other ranks' keys and values and merged results, forward and backward
        (context_attention.py)."""
        call, scale = self.pricer.contractions.context_call(ran.operator, ran.option), self.scale
        return (call.forward_temporary() * scale, call.backward_temporary() * scale) if call else (0.0, 0.0)

    def _probabilities(self, ran: Ran) -> float:
        """Return attention's bytes with dropout (attention.py): scores, masked scores and softmax, without the kept
        ones."""
        node = ran.operator.node
        if base_name(node.op) != "scaled_dot_product_attention":
            return 0.0
        if not has_dropout(node):
            return 0.0
        output, (query, key) = node.outputs[0], ran.operator.inputs[:2]
        rows = num_local(output, ran.option.outputs[0], self.pricer.mesh) // query.shape[-1]
        return float(rows * key.shape[-2] * output.dtype.itemsize) * self.scale

    def _chunk(self, ran: Ran) -> float:
        """Return cross-entropy's fp32 chunk of half-precision logits, and on a GPU that of logsumexp."""
        meta = ran.operator.inputs[0]
        elements = min(num_local(meta, ran.option.inputs[0], self.pricer.mesh), CROSS_ENTROPY_ELEMENTS[self.kind])
        return 4.0 * elements * ((meta.dtype.itemsize < 4) + (self.kind == "gpu")) * self.scale

    def _again(self, keys: Iterable[Key]) -> float:
        """Return the bytes of tensors that are gathered for one call at a time."""
        return sum(self._bytes(self.scope.metas[key[0]], key[1]) for key in self.gathered.keys() & set(keys))

    def _copies(self, move: Moved) -> float:
        """Return contiguous copies around collectives along dims other than 0 (reshard.py `split_parts`,
        `join_parts`)."""
        meta = self.scope.metas[move.ref]
        moving = (step for step in move.path if step.forward or step.backward)
        inner = (s for s in moving if any(p.is_shard and p.dim for p in (s.source, s.target)))
        return max((meta.num_bytes * step.fraction for step in inner), default=0.0) * self.scale

    # Backward ---------------------------------------------------------------------------------------------------------

    def _backward(self, waits: bool = False, defers: bool = False) -> tuple[float, float, float]:
        """Return (peak, deferred bytes, gradients of the unit's inputs). waits: parameters' gradients stay."""
        gradients = Gradients()
        kept, left = self.kept_bytes, 0.0
        deferred_keys, tasks = set[Key](), set[int]()
        for ref, placements in self.ends:
            if self.scope.metas[ref].requires_grad:
                gradients.add((ref, placements), gradients.new(self._bytes(self.scope.metas[ref], placements)))
        peak = kept + gradients.total
        stays = 0.0
        for event in reversed(self.events):
            if isinstance(event, Moved):
                peak = max(peak, self._move_backward(event, gradients) + kept + stays)
                continue
            node, option = event.operator.node, event.option
            outs = [(Ref(event.name, i), where) for i, where in enumerate(option.outputs)]
            present = [gradients.of[key] for key in outs if key in gradients.of]
            if not present:
                present = [gradients.new(0.0)] if any(meta.requires_grad for meta in node.outputs) else []
            if not present:
                continue
            is_linear = defers and self.pricer.may_defer(event.operator, option)
            weights = [] if is_linear else self._weights(event)
            gradients_of_inputs = self._inputs_backward(event, present[0], gradients)
            temporary = self._backward_temporary(event) + self._again(zip(node.inputs, option.inputs, strict=True))
            peak = max(peak, kept + stays + gradients.total + sum(weights) + temporary)
            stays += sum(weights) if waits else 0.0
            if is_linear:
                position = DEFERRABLE[base_name(node.op)] - 1  # of x, which the weight's gradient needs
                deferred_keys.add(self._root(node.inputs[position], option.inputs[position]))
                for number in present:
                    gradients.hold(number)
                    tasks.add(number)
            for key, number in gradients_of_inputs:
                gradients.add(key, number)
            for key in outs:
                if key in gradients.of:
                    gradients.drop(gradients.of.pop(key))
            for storage, size in self.kept[event.name]:
                if storage in deferred_keys:
                    left += size
                else:
                    kept -= size
        entering = sum(gradients.sizes[number] for number in set(gradients.of.values()))
        return peak, left + sum(gradients.sizes[number] for number in tasks), entering

    def _move_backward(self, move: Moved, gradients: Gradients) -> float:
        number = gradients.of.pop((move.ref, move.target), None)
        if number is None:
            return 0.0
        if all((s.source.kind, s.target.kind) in (("P", "R"), ("R", "P")) for s in move.path):
            number_of_gradient = number
        else:
            number_of_gradient = gradients.new(self._bytes(self.scope.metas[move.ref], move.source))
        peak = gradients.total + self._copies(move)
        if move.ref.node in self.parameters:
            gradients.hold(number_of_gradient)
            gradients.drop(number_of_gradient)
        else:
            gradients.add((move.ref, move.source), number_of_gradient)
        gradients.drop(number)
        return peak

    def _inputs_backward(self, ran: Ran, output_gradient: int, gradients: Gradients) -> list[tuple[Key, int]]:
        node, option = ran.operator.node, ran.option
        name, output = base_name(node.op), node.outputs[0]
        numbers = []
        for position, ref in enumerate(node.inputs):
            meta, placements = self.scope.metas[ref], option.inputs[position]
            if not meta.requires_grad or (ref.node in self.parameters):
                continue
            size = self._bytes(meta, placements)
            is_same = size == gradients.sizes[output_gradient] or name in VIEWS | JOINS
            hands_on = name in HANDED_ON and is_same and not (name == "sub" and position == 1)
            hands_on = hands_on or (name == "to" and meta.dtype == output.dtype)
            numbers.append(((ref, placements), output_gradient if hands_on else gradients.new(size)))
        return numbers

    def _weights(self, ran: Ran) -> list[float]:
        return [
            self._bytes(self.scope.metas[ref], placements)
            for ref, placements in zip(ran.operator.node.inputs, ran.option.inputs, strict=True)
            if ref.node in self.parameters and self.scope.metas[ref].requires_grad
        ]

    def _backward_temporary(self, ran: Ran) -> float:
        name = base_name(ran.operator.node.op)
        if name == "cross_entropy_loss":
            return self._chunk(ran)
        if name in BACKWARD_TEMPORARIES:
            return BACKWARD_TEMPORARIES[name] * self._bytes(ran.operator.inputs[0], ran.option.inputs[0])
        in_kernel = self.pricer.backward_bytes(ran.operator, ran.option)
        return self._probabilities(ran) + self._exchanged(ran)[1] + in_kernel * self.scale
