"""Prove from the graph what the micro-batches of a step must do so that they add up to the whole batch's loss.

The micro-batches of a step are a mesh axis that is walked sequentially, and the operators' rules (autopar/rules) say
what any axis may do. With m micro-batches, the value V of a tensor for the whole batch follows from its values v_1 ...
v_m for the micro-batches in one of three ways, each with a number c:

    R       V = c * v_i            the same for all micro-batches: parameters, position tables, numbers of rows
        S(d/k)  V's i-th slice = c * v_i       tensors with rows
        P       V = c * (v_1 + ... + v_m)      complete after the last micro-batch

Inputs are S, parameters R. A call whose rule allows the rows' factor to be sharded gives S, or P if it contracts them.
A sum has c = 1. A mean has c = 1/m, because the call divides by fewer rows for a micro-batch. The same applies to every
other number that counts rows, such as `/ x.shape[0]`: the graph of the whole batch is compared with that of a
micro-batch, and a factor or divisor that differs goes into c. A call is

        homogeneous in its inputs   their c's multiply into the result's (a product), or pass through (linear in a set
        of
                                    inputs with one c): nothing has to be done
        not homogeneous             inputs of S and R are multiplied by their c first (`Accumulation.scales`)
        linear in a P               the result is P. An R added to it must count as 1/m of it in every micro-batch, so
                                    c = 1/m needs no change: a mean loss plus a penalty on parameters stays as it is
        not linear in a P           exp(P), P * P, x / P: the sum must be complete first, and is R from then on
                                    (`batch_sums.py`): one factor of P * P if it needs no gradient, else both

The whole batch is also needed by calls that look across rows (a blocked factor), that have no rule, or that number rows
(arange), and by dropout and draws whose numbers would restart in every micro-batch. A loss that is P is multiplied by
m * c, because the step takes the mean of the micro-batches' losses. Gradients follow: the sum of the differentiated
values over micro-batches is the whole batch's loss, as a function of the parameters. For a complete sum with a
gradient, the mean of the micro-batches' gradients is the whole batch's gradient (`Share.has_own_gradient`). Tensors
computed from such sums and from parameters have the same property, and m-th parts of them may be added to a P. They may
not multiply rows or P's: each row's gradient would then be that of the micro-batch instead of the whole batch.

The proof holds for the two graphs it compares. It is linear in their calls; layers of one class are walked once for
each combination of input shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from autopar.accumulation.batch_shares import (
    ONE,
    SAME,
    Share,
    Site,
    WholeBatchError,
    lent,
    linear_sets,
    numbers_of,
)
from autopar.accumulation.batch_sums import CompleteSums, Key, OtherSumsError
from autopar.frontend.effects import is_random
from autopar.ir.graph import Accumulation, Graph, LayerRun, Node, Ref, TensorMeta
from autopar.ir.placement import P, R, S
from autopar.operators.traits import DRAWN, FILLS
from autopar.rules.call import Call
from autopar.rules.families.loss import is_plain_cross_entropy
from autopar.rules.registry import rule_for
from autopar.rules.rule import AxisOption, find_factor, shard_option
from autopar.sharding.batch_and_sequence_dims import factor_of
from autopar.sharding.scopes import Scope, scopes_of


def accumulation(whole: Graph, micro: Graph) -> Accumulation:
    """Return what micro-batches as `micro` must do to add up to the batch of `whole`. Raises WholeBatchError."""
    refs, tried = frozenset[Key](), set[frozenset[Key]]()
    while refs not in tried:
        tried.add(refs)
        try:
            return _Proof(whole, micro, CompleteSums(whole, refs)).run()
        except OtherSumsError as restart:
            refs = restart.refs
    raise WholeBatchError("sums over the batch depend on one another")


class _Proof:
    """One walk over both graphs. sums: those that are complete before they are read."""

    def __init__(self, whole: Graph, micro: Graph, sums: CompleteSums) -> None:
        self.whole, self.micro, self.sums = whole, micro, sums
        self.count = whole.batch_size // micro.batch_size
        self.scales: dict[tuple[str, str, int], Fraction] = {}
        self.counted: list[Ref] = []
        self.scopes = {scope.name: scope for scope in scopes_of(whole)}
        self.twins = {scope.name: scope for scope in scopes_of(micro)}
        self.walked: dict[tuple[str, tuple[Share, ...]], tuple[Share, ...]] = {}
        self.draws: dict[tuple[str, str], bool] = {}

    def run(self) -> Accumulation:
        body, twins = self.whole.body, self.micro.body
        if len(body) != len(twins) or self.whole.loss != self.micro.loss or self.scopes.keys() != self.twins.keys():
            raise WholeBatchError("the model makes other calls for a micro-batch than for the whole batch")
        shares = {Ref(p.name): SAME for p in self.whole.parameters}
        for item in self.whole.inputs:
            shares[Ref(item.name)] = SAME if item.batch_dim is None else Share(S(item.batch_dim))
        for piece, twin in zip(body, twins, strict=True):
            if isinstance(piece, LayerRun) and isinstance(twin, LayerRun):
                shares |= self.layers(piece, twin, shares)
            elif isinstance(piece, Node) and isinstance(twin, Node):
                shares |= self.call(self.scopes[""], piece, twin, shares)
            else:
                raise WholeBatchError("the model has other layers for a micro-batch than for the whole batch")
        self.sums.check_counted(self.counted)
        used = {key: scale for key, scale in self.scales.items() if scale != 1}
        repeated = frozenset(key for key, goes_on in self.draws.items() if not goes_on)
        return Accumulation(
            whole=self.sums.before,
            scales=used,
            loss=self.loss_scale(shares[self.whole.loss]),
            repeated=repeated,
            summed=self.sums.summed,
        )

    def loss_scale(self, loss: Share) -> Fraction:
        if loss.placement.is_shard:
            raise WholeBatchError("the loss has one value per row of the batch")
        return loss.scale * self.count if loss.is_sum else loss.scale

    # --- layers -------------------------------------------------------------------------------------------------------

    def layers(self, run: LayerRun, twin: LayerRun, shares: Mapping[Ref, Share]) -> dict[Ref, Share]:
        """Return the shares of a run's outputs; layers with equal input shares are walked once."""
        if (run.args, run.carried, run.instances) != (twin.args, twin.carried, twin.instances):
            raise WholeBatchError(f"the layers {run.instances[0]} ... are wired otherwise for a micro-batch")
        entering = [shares[ref] for ref in run.args]
        leaving: tuple[Share, ...] = ()
        for _ in run.instances:
            leaving, before = self.layer(run.layer.name, tuple(entering)), tuple(entering)
            for position, output in run.carried:
                entering[position] = leaving[output]
            if before == tuple(entering):
                break
        outputs = {Ref(run.name, index): share for index, share in enumerate(leaving)}
        return {
            ref: self.sums.after(("", ref), share, meta.requires_grad)
            for (ref, share), meta in zip(outputs.items(), run.outputs, strict=True)
        }

    def layer(self, name: str, entering: tuple[Share, ...]) -> tuple[Share, ...]:
        if (name, entering) not in self.walked:
            scope, twin = self.scopes[name], self.twins[name]
            layer, twin_layer = scope.layer, twin.layer
            if layer is None or twin_layer is None or len(layer.nodes) != len(twin_layer.nodes):
                raise WholeBatchError(f"layers {name} make other calls for a micro-batch than for the whole batch")
            shares = {Ref(p.name): SAME for p in layer.parameters}
            shares |= {Ref(formal): share for (formal, _), share in zip(layer.inputs, entering, strict=True)}
            for node, twin_node in zip(layer.nodes, twin_layer.nodes, strict=True):
                shares |= self.call(scope, node, twin_node, shares)
            self.walked[name, entering] = tuple(shares[ref] for ref in layer.outputs)
        return self.walked[name, entering]

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, scope: Scope, node: Node, twin: Node, shares: Mapping[Ref, Share]) -> dict[Ref, Share]:
        """Return the shares of a call's results."""
        site = self.site(scope, node, twin, shares)
        if site.with_own_gradients and site.has_rows:
            raise site.error("is not linear in a sum over the batch, whose gradient is not known for single rows")
        if site.sums:
            results = self.of_sums(site)
        elif any(share.placement.is_shard for share in site.inputs):
            results = self.of_rows(site)
        elif site.grows:
            results = self.of_nothing(site)
        else:
            results = (Share(R, self.scale_of(site)),) * len(node.outputs)
        if site.packet in DRAWN:
            self.draw(site, results[0])
        return {Ref(node.name, index): self.result(site, index, share) for index, share in enumerate(results)}

    def draw(self, site: Site, share: Share) -> None:
        """Record whether a call's mask continues across micro-batches; all layers of its class must agree."""
        goes_on = share.placement.is_shard
        if self.draws.setdefault((site.scope.name, site.node.name), goes_on) != goes_on:
            raise site.error("draws a mask of the rows in one layer, and one without rows in another")

    def site(self, scope: Scope, node: Node, twin: Node, shares: Mapping[Ref, Share]) -> Site:
        metas = tuple(scope.metas[ref] for ref in node.inputs)
        twin_scope = self.twins[scope.name]
        call = Call.of(node, metas)
        inputs = tuple(lent(call, i, shares[ref]) for i, ref in enumerate(node.inputs))
        site = Site(scope=scope, node=node, twin=twin, call=call, rule=rule_for(node, metas), inputs=inputs, numbers={})
        if node.op != twin.op or node.inputs != twin.inputs or len(node.outputs) != len(twin.outputs):
            raise site.error("is another call for a micro-batch than for the whole batch")
        if site.packet not in DRAWN and is_random(node):
            raise site.error("draws random numbers")
        twins = Call.of(twin, tuple(twin_scope.metas[ref] for ref in twin.inputs))
        return replace(site, numbers=numbers_of(site, call, twins))

    def result(self, site: Site, index: int, share: Share) -> Share:
        """Check that both graphs have the shapes `share` implies; return it, or the share of a complete sum."""
        whole, micro = site.node.outputs[index], site.twin.outputs[index]
        shape = list(whole.shape)
        if share.placement.is_shard:
            shape[share.placement.dim] //= self.count
        if tuple(shape) != micro.shape or whole.dtype != micro.dtype:
            raise site.error(f"makes {_text(micro)} of a micro-batch and {_text(whole)} of the whole batch")
        is_own = bool(site.with_own_gradients) and whole.requires_grad and share.placement == R
        is_late = any(input_share.is_late for input_share in site.inputs)
        share = replace(share, is_late=is_late, has_own_gradient=is_own)
        parts = [self.sums.key(site.scope, site.node.inputs[i]) for i in site.sums]
        return self.sums.after((site.scope.name, Ref(site.node.name, index)), share, whole.requires_grad, parts)

    def of_nothing(self, site: Site) -> tuple[Share, ...]:
        """Return the shares of rows created from inputs without rows: filled or expanded."""
        rule, (whole, *more), micro = site.rule, site.node.outputs, site.twin.outputs[0]
        dims = [d for d, (a, b) in enumerate(zip(whole.shape, micro.shape, strict=False)) if a != b]
        if rule is None or more or len(dims) != 1 or len(whole.shape) != len(micro.shape):
            raise site.error("depends on the number of rows")
        for factor in rule.outputs[0][dims[0]]:
            option = shard_option(rule, factor)
            if option.lowering == "draw" and dims[0]:
                raise site.error("draws numbers whose first dim is not the batch, and would draw them again")
            is_made = option.lowering in (None, "draw")
            is_free = factor not in rule.blocked and is_made and rule.sizes[factor] % self.count == 0
            if is_free and not any(p.is_shard for p in option.inputs):
                return (Share(option.outputs[0], self.scale_of(site)),)
        raise site.error(
            "numbers the rows of the batch" if site.packet == "arange" else "depends on the number of rows"
        )

    def of_rows(self, site: Site) -> tuple[Share, ...]:
        """Return the shares of a call's results if some inputs have rows and the others are R."""
        option = self.option(site)
        for needed, share in zip(option.inputs, site.inputs, strict=True):
            if needed == P or (needed.is_shard or share.placement.is_shard) and needed != share.placement:
                raise site.error("combines the rows of the batch with one another")
        scale = self.scale_of(site)
        placements = [R if p.is_replicated else p for p in option.outputs]
        if option.lowering in ("mean", "cross_entropy"):
            scale /= self.count
        elif option.lowering in DRAWN or option.lowering == "attention":
            if placements[0] != S(0):
                raise site.error("draws a mask whose first dim is not the batch, and would draw it again")
        elif option.lowering is not None:
            raise site.error("looks across the rows of the batch")
        if option.lowering == "cross_entropy":
            self.check_counted(site)
        return tuple(Share(p, scale) for p in placements)

    def option(self, site: Site) -> AxisOption:
        """Return the option that shards the rows over the micro-batches."""
        rule = site.rule
        if rule is None:
            raise site.error("has no rule in autopar that says what becomes of the rows of the batch")
        factors = {
            factor_of(rule, dims, share.placement)
            for dims, share in zip(rule.inputs, site.inputs, strict=True)
            if share.placement.is_shard
        }
        if len(factors) > 1 or None in factors:
            raise site.error("combines the rows of the batch with one another")
        row_factor = next(iter(factors))
        assert row_factor is not None
        factor, sections = row_factor
        if factor in rule.blocked or rule.sizes[factor] % (sections * self.count):
            raise site.error("looks across the rows of the batch")
        for dims, share in zip(rule.inputs, site.inputs, strict=True):
            if not share.placement.is_shard and find_factor(rule, dims, factor, sections):
                raise site.error("combines the rows of the batch with one another")
        return shard_option(rule, factor, sections)

    def check_counted(self, site: Site) -> None:
        """Record a mean over targets that are not ignored: the program must be able to count them before the step."""
        target = site.node.inputs[1]
        is_before = site.scope.layer is None and self.sums.needs_batch_only(target)
        if not is_plain_cross_entropy(site.node, site.call.inputs) or not is_before:
            raise site.error("divides by a number of targets that is known only after the forward")
        self.counted.append(target)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def scale_of(self, site: Site, others: Sequence[int] | None = None) -> Fraction:
        """Return the result's number from those of the inputs (only of `others`, besides partial sums).

        Inputs in which the call is not homogeneous are first scaled to the whole batch's value.
        """
        considered = range(len(site.inputs)) if others is None else others
        scales = {i: site.inputs[i].scale for i in considered}
        if site.packet == "mul":
            return math.prod([*scales.values(), *site.numbers.values()], start=ONE)
        if site.packet == "div" and site.call.get("rounding_mode") is None:
            return self.quotient(site, scales)
        if site.packet in FILLS and not site.inputs and set(site.numbers) <= {FILLS[site.packet]}:
            return math.prod(site.numbers.values(), start=ONE)
        if site.adds_number and set(site.numbers) == {"other"}:
            number = site.numbers["other"]
            for index, scale in scales.items():
                self.multiply(site, index, scale / number)
            return number
        if site.numbers:
            raise site.error(f"has an argument that depends on the number of rows: {', '.join(site.numbers)}")
        linear = site.rule.linear if site.rule is not None and others is None else ()
        for members in linear:
            inside = {scale for i, scale in scales.items() if i in members}
            if len(inside) == 1 and all(scale == 1 for i, scale in scales.items() if i not in members):
                return inside.pop()
        for index, scale in scales.items():
            self.multiply(site, index, scale)
        return ONE

    def quotient(self, site: Site, scales: Mapping[int, Fraction]) -> Fraction:
        above, below = (site.index_of(name) for name in ("self", "other"))
        divisor = scales.get(below, ONE) if below is not None else site.numbers.get("other", ONE)
        if set(site.numbers) - {"other"}:
            raise site.error("has an argument that depends on the number of rows")
        return (scales.get(above, ONE) if above is not None else ONE) / divisor

    def multiply(self, site: Site, index: int, scale: Fraction) -> None:
        """Multiply an input of the call by `scale` in every micro-batch."""
        key = site.scope.name, site.node.name, index
        if self.scales.setdefault(key, scale) != scale:
            raise site.error("would have to be scaled otherwise in some of the layers")
        is_floating = site.call.inputs[index].dtype.is_floating_point
        if scale != 1 and not is_floating and scale.denominator != 1:
            raise site.error("depends on the number of rows")

    # --- partial sums -------------------------------------------------------------------------------------------------

    def of_sums(self, site: Site) -> tuple[Share, ...]:
        """Return the shares of a call's results if some inputs are P."""
        sums, own_gradients = site.sums, site.with_own_gradients
        sets = [] if site.has_rows else linear_sets(site)
        rests = []
        for members, adds_number in sets:
            rests.append([i for i in sums if i not in members])
            if not rests[-1] and members.issuperset(own_gradients):
                return self.linear_in(site, members, adds_number)
        # The call is linear in the other inputs once these sums are complete.
        partly = sorted(filter(None, rests), key=len)
        for indices in (*partly, sums):
            if all(self.sums.needs_batch_only(site.node.inputs[i]) for i in indices) and site.scope.layer is None:
                raise self.sums.and_inputs(site, indices)
        without = [rest for rest in partly if not any(site.call.inputs[i].requires_grad for i in rest)]
        raise self.sums.and_inputs(site, without[0] if without else sums)

    def linear_in(self, site: Site, members: frozenset[int], adds_number: bool) -> tuple[Share, ...]:
        """Return the shares if all sums are among `members`, in which the call is linear; its other members are R."""
        scales = {site.inputs[i].scale for i in members}
        mixed = adds_number or len(scales) > 1 or not all(site.inputs[i].is_sum for i in members)
        if adds_number and set(site.numbers) - {"other"}:
            raise site.error(f"has an argument that depends on the number of rows: {', '.join(site.numbers)}")
        # The other members are then correct unchanged, unless they count rows themselves.
        number = site.numbers.get("other", ONE) if adds_number else ONE
        target = number / self.count if mixed else scales.pop()
        for index in members:
            share = site.inputs[index]
            self.multiply(site, index, share.scale / target if share.is_sum else share.scale / (target * self.count))
        others = [i for i in range(len(site.inputs)) if i not in members]
        outside = self.scale_of(site, others) if not adds_number else ONE
        return (Share(P, target * outside),) * len(site.node.outputs)


def _text(meta: TensorMeta) -> str:
    return f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')}"
