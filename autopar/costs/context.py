"""Seconds and memory of attention over keys of several ranks (codegen/runtime/context_attention.py).

n ranks have L queries and M keys each. Causal attention is cut in stripes: every rank sees half of each block. b: bytes
of this rank's keys and values; B = n b: of all. w: bytes of the gradients of b as they travel in the ring. f(m), g(m):
seconds of a flash kernel over m keys, forward and backward; f', g': the same under the diagonal of a causal mask.

                 forward                                       backward
    all_gather   all_gather(B) + n f'                          all_gather(B) + n g' + reduce_scatter(B)
    ring         each of n steps but the last as long as the   the same with g', p2p(b) + p2p(w), and p2p(w) at the end
                 longer of its f' and of p2p(b)

Without a mask these are f(n M) or f(M), and g alike. With a window the kernels read the keys of its tiles. Where ranks
have consecutive blocks, neighbors exchange the keys that the window reaches (NearCall). Copies come on top: keys and
values are packed into one buffer, blocks that arrive together are joined along the sequence, results are merged in
fp32. Where torch's flash kernels do not apply, attention_blocks.py computes formulas. These have the scores of all
local queries and keys in memory, or of one tile of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from autopar.ir.graph import SINK_ATTENTION, is_causal
from autopar.ir.mesh import Mesh
from autopar.rules.families.attention import EXCHANGES, window_of
from autopar.sharding.call_options import Operator, Option, num_local
from codegen.runtime.windows import Positions, Window
from cost_models import collective

CollectiveSeconds = Callable[[collective.Kind, int, float], float]
MemorySeconds = Callable[[float], float]
AttentionSeconds = Callable[[int, bool], tuple[float, float]]
"""(keys, whether the mask's diagonal runs through them) -> (forward, backward) seconds of a kernel with the rank's
queries."""

WIDE_BYTES = 4
"""Bytes of an element that is merged or travels as a sum; 8 for float64."""

SCORES_HELD = (3, 4)
SCORES_MOVED = (6, 10)
"""Tensors of the scores' size that the formulas keep in memory, and read and write, forward and backward: counted in
attention_blocks.py."""


@dataclass(frozen=True, slots=True)
class Habits:
    """The exchange rules of a framework for keys and values.

    copies: it packs, joins and merges in separate tensors. widens: gradients travel and are summed in fp32.
    one_message: in a ring, gradients travel in one message with keys and values. sends_again: an exchange is repeated
    where recomputation keeps the results of attention.
    """

    copies: bool = True
    widens: bool = True
    one_message: bool = False
    sends_again: bool = True


GENERATED = Habits()
"""Generated programs (codegen/runtime/context_attention.py)."""

PUBLISHED = Habits(copies=False, widens=False, one_message=True, sends_again=False)
"""Published frameworks: an exchange costs only what crosses the links. A. Dubey et al., "The Llama 3 Herd of Models"
(2024), section 3.3.2; H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers" (2023), section
3."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Seconds of a call's forward or backward. kernels: of attention. copies: in memory. sent: exposed communication
    by kind of collective. hidden: communication overlapped with kernels, which takes no time."""

    kernels: float
    copies: float
    sent: Mapping[str, float]
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the direction."""
        return self.kernels + self.copies + sum(self.sent.values())


@dataclass(frozen=True, slots=True)
class ContextCall:
    """An attention call on one rank. axis: its number; size: n; heads: batch x heads; queries, keys: L and M; part:
    b; wide_part: w; result, wide_result: bytes of the result, and of its fp32 form; scores: elements for the
    queries and keys of one rank, 0 for a flash kernel. tile_keys: with a window, the keys that kernels read for
    each query. num_tiles: tiles with scores, one after the other."""

    exchange: str
    axis: int
    size: int
    is_causal: bool
    heads: int
    queries: int
    keys: int
    part: float
    wide_part: float
    result: float
    wide_result: float
    scores: float = 0.0
    tile_keys: int | None = None
    num_tiles: int = 1
    is_striped: bool = False
    habits: Habits = GENERATED

    @property
    def whole(self) -> float:
        """Return the bytes of all ranks' keys and values, B in the formulas above."""
        return self.size * self.part

    @property
    def num_blocks(self) -> int:
        """Return the number of kernels of the forward."""
        is_striped_window = self.tile_keys is not None and self.is_striped
        return self.size if self.exchange == "ring" or self.is_causal or is_striped_window else 1

    @property
    def kept_blocks(self) -> int:
        """Return the number of kernels with results that stay where a second forward skips attention."""
        return self.num_blocks if self.habits.copies else 1

    @property
    def parts_at_once(self) -> int:
        """Return how many ranks' keys a kernel reads. For a window `scores` already counts those of its tiles."""
        return self.size // self.num_blocks if self.tile_keys is None else 1

    def seconds(
        self, collectives: CollectiveSeconds, memory: MemorySeconds, attention: AttentionSeconds
    ) -> tuple[float, float]:
        """Return the seconds (forward, backward) of the call. memory: seconds to move a number of bytes."""
        forward, backward = self.directions(collectives, memory, attention)
        return forward.seconds, backward.seconds

    def directions(
        self, collectives: CollectiveSeconds, memory: MemorySeconds, attention: AttentionSeconds
    ) -> tuple[Direction, Direction]:
        """Return the forward and the backward, split by cause."""
        num_scores = self.parts_at_once * self.num_blocks * self.scores
        in_scores = [memory(n * num_scores) if self.scores else 0.0 for n in SCORES_MOVED]
        copied = memory if self.habits.copies else _nothing
        merged, packed = self._merging(copied), copied(2 * self.part)
        if self.exchange == "ring":
            once, back = (collectives("p2p", self.axis, size) for size in (self.part, self.wide_part))
            both = collectives("p2p", self.axis, self.part + self.wide_part) if self.habits.one_message else once + back
            f, g = attention(self.tile_keys or self.keys, self.is_causal)
            added = self.size * copied(2 * self.part + 2 * self.wide_part + 3 * self.wide_result)
            steps = self.size - 1
            return (
                Direction(
                    kernels=self.size * f + in_scores[0],
                    copies=packed + merged,
                    sent={"p2p": steps * max(once - f, 0.0)},
                    hidden=steps * min(once, f),
                ),
                Direction(
                    kernels=self.size * g + in_scores[1],
                    copies=packed + added,
                    sent={"p2p": steps * max(both - g, 0.0) + back},
                    hidden=steps * min(both, g),
                ),
            )
        gather, scatter = (collectives(kind, self.axis, self.whole) for kind in ("all_gather", "reduce_scatter"))
        f, g = attention(self.tile_keys or self.parts_at_once * self.keys, self.is_causal)
        joined, added = copied(2 * self.whole), copied(3 * self.whole + 3 * self.wide_result)
        return (
            Direction(self.num_blocks * f + in_scores[0], packed + joined + merged, {"all_gather": gather}),
            Direction(
                self.num_blocks * g + in_scores[1],
                packed + joined + added,
                {"all_gather": gather, "reduce_scatter": scatter},
            ),
        )

    def again_seconds(self, collectives: CollectiveSeconds, memory: MemorySeconds) -> float:
        """Return the seconds of a recomputed forward where the results of its kernels are kept."""
        if not self.habits.sends_again:
            return 0.0
        around = memory(2 * self.part) + self._merging(memory)
        if self.exchange == "ring":
            return around + (self.size - 1) * collectives("p2p", self.axis, self.part)
        return around + collectives("all_gather", self.axis, self.whole) + memory(2 * self.whole)

    def _merging(self, memory: MemorySeconds) -> float:
        return (self.num_blocks - 1) * memory(self.result + 3 * self.wide_result)

    def forward_temporary(self) -> float:
        """Return the temporary bytes at the forward's peak, without arguments and result."""
        if not self.habits.copies:
            return 2 * self.part if self.exchange == "ring" else self.whole
        merged, scores = self.result + 3 * self.wide_result, SCORES_HELD[0] * self.scores / self.num_tiles
        if self.exchange == "ring":
            return 2 * self.part + max(merged, scores)
        joined = self.whole / self.num_blocks
        before = self.wide_result * self.is_causal
        return self.whole + max(joined + before + self.parts_at_once * scores, merged * self.is_causal)

    def backward_temporary(self) -> float:
        """Return the temporary bytes at the backward's peak, without kept tensors and gradients of result and
        arguments."""
        if not self.habits.copies:  # of all that travels: the block in use and the one that arrives
            return 2 * (self.part + self.wide_part) if self.exchange == "ring" else 2 * self.whole
        sums = self.result + (self.wide_result if self.wide_result > self.result else 0.0)
        scores = SCORES_HELD[1] * self.scores / self.num_tiles
        if self.exchange == "ring":
            return 3 * self.part + 2 * self.wide_part + sums + scores
        joined = self.whole / self.num_blocks
        return 2 * self.whole + 2 * joined - self.part + sums + self.parts_at_once * scores


@dataclass(frozen=True, slots=True)
class NearCall:
    """A call of attention over windows in consecutive blocks, on one rank. axis, size, heads, queries, keys, part,
    wide_result: as in ContextCall. tile_keys: the keys that kernels read for each query. near: bytes of keys and
    values from the neighbors; wide_near: of their gradients; wide_part: of the local gradients as they are
    summed. scores: as in ContextCall, of all tiles. num_blocks: kernels per query."""

    axis: int
    size: int
    heads: int
    queries: int
    keys: int
    part: float
    wide_part: float
    near: float
    wide_near: float
    wide_result: float
    tile_keys: int
    scores: float = 0.0
    num_tiles: int = 1
    num_blocks: int = 1

    @property
    def kept_blocks(self) -> int:
        """Return the number of kernels with results that stay where a second forward skips attention."""
        return self.num_blocks

    def seconds(
        self, collectives: CollectiveSeconds, memory: MemorySeconds, attention: AttentionSeconds
    ) -> tuple[float, float]:
        """Return the seconds (forward, backward) of the call, as ContextCall does."""
        forward, backward = self.directions(collectives, memory, attention)
        return forward.seconds, backward.seconds

    def directions(
        self, collectives: CollectiveSeconds, memory: MemorySeconds, attention: AttentionSeconds
    ) -> tuple[Direction, Direction]:
        """Return the forward and the backward, split by cause."""
        f, g = attention(self.tile_keys, False)
        in_scores = [memory(n * self.scores) if self.scores else 0.0 for n in SCORES_MOVED]
        once = collectives("p2p", self.axis, self.near) if self.near else 0.0
        back = collectives("p2p", self.axis, self.wide_near) if self.near else 0.0
        joined = memory(4 * self.near + 2 * self.part) if self.near else 0.0
        split = memory(4 * self.wide_near) if self.near else 0.0
        added = memory(3 * (self.wide_part + self.wide_near) + self.part)
        return (
            Direction(f + in_scores[0], joined, {"p2p": once}),
            Direction(g + in_scores[1], joined + split + added, {"p2p": once + back}),
        )

    def again_seconds(self, collectives: CollectiveSeconds, memory: MemorySeconds) -> float:
        """Return the seconds of a recomputed forward where the results of its kernels are kept."""
        if not self.near:
            return 0.0
        return collectives("p2p", self.axis, self.near) + memory(4 * self.near + 2 * self.part)

    def forward_temporary(self) -> float:
        """Return the temporary bytes at the forward's peak, without arguments and result."""
        joined = 2 * self.near + self.part if self.near else 0.0
        return joined + self.wide_result + SCORES_HELD[0] * self.scores / self.num_tiles

    def backward_temporary(self) -> float:
        """Return the temporary bytes at the backward's peak, without kept tensors and gradients of result and
        arguments."""
        joined = 2 * self.near + self.part if self.near else 0.0
        sums = self.wide_part + self.wide_near + self.wide_result
        return joined + sums + SCORES_HELD[1] * self.scores / self.num_tiles


def seen_keys(operator: Operator) -> int:
    """Return for how many keys attention on one rank computes scores, per query."""
    window, queries, keys = window_of(operator.node), *(meta.shape[-2] for meta in operator.inputs[:2])
    if window is None:
        return keys
    return round(_tile_pairs(window, queries) / queries)


_tile_pairs = cache(Window.tile_pairs)
_mask_sizes = cache(Window.mask_sizes)


def window_tiles(operator: Operator) -> tuple[int, int]:
    """Return (tiles of attention over windows of a whole sequence, elements of all their masks)."""
    window = window_of(operator.node)
    return (1, 0) if window is None else _mask_sizes(window, operator.inputs[0].shape[-2])


def context_call(
    operator: Operator, option: Option, mesh: Mesh, on_cpu: bool, habits: Habits = GENERATED
) -> ContextCall | NearCall | None:
    """Return the call of one rank if the option cuts its keys along the sequence, else None. on_cpu: a CPU's flash
    kernel takes all dtypes."""
    axis = next((number for number, choice in enumerate(option.axes) if choice.lowering in EXCHANGES), None)
    if axis is None:
        return None
    choice, size = option.axes[axis], mesh.sizes[axis]
    exchange, is_striped = str(choice.lowering), operator.rule.joints[choice.label].is_striped
    (query, key), output = operator.inputs[:2], operator.node.outputs[0]
    queries, keys = query.shape[-2] // size, key.shape[-2] // size
    elements = sum(num_local(operator.inputs[i], option.inputs[i], mesh) for i in (1, 2))
    heads = num_local(query, option.inputs[0], mesh) // (queries * query.shape[-1])
    wide = max(WIDE_BYTES, key.dtype.itemsize) if habits.widens else key.dtype.itemsize
    results = num_local(output, option.outputs[0], mesh)
    window = window_of(operator.node) if habits.copies else None
    tile_keys: int | None = None
    num_masked = 0
    if window is not None:
        tile_keys, num_masked = _pieces(window, queries, size, is_striped)
    has_mask = len(operator.inputs) > (4 if operator.node.op == SINK_ATTENTION else 3)
    is_flash = on_cpu or (not has_mask and not num_masked and key.dtype.itemsize < WIDE_BYTES)
    is_flash = is_flash or not habits.copies
    if window is not None and tile_keys is not None and exchange == "ring" and not is_striped:
        reached = sum(window.reach(queries * size, size)) / keys
        return NearCall(
            axis=axis,
            size=size,
            heads=max(heads, 1),
            queries=queries,
            keys=keys,
            part=float(elements * key.dtype.itemsize),
            wide_part=float(elements * wide),
            near=elements * key.dtype.itemsize * reached,
            wide_near=elements * wide * reached,
            wide_result=float(results * wide),
            tile_keys=tile_keys,
            scores=0.0 if is_flash else float(heads * queries * tile_keys * wide),
            num_tiles=max(num_masked, 1),
            num_blocks=1 if num_masked else 2,
        )
    return ContextCall(
        exchange=exchange,
        axis=axis,
        size=size,
        is_causal=is_causal(operator.node),
        heads=max(heads, 1),
        queries=queries,
        keys=keys,
        part=float(elements * key.dtype.itemsize),
        wide_part=float(elements * wide),
        result=float(results * output.dtype.itemsize),
        wide_result=float(results * wide),
        scores=0.0 if is_flash else float(heads * queries * (tile_keys or keys) * wide),
        tile_keys=tile_keys,
        num_tiles=max(num_masked, 1),
        is_striped=is_striped,
        habits=habits,
    )


def _nothing(num_bytes: float) -> float:
    return 0.0


@cache
def _pieces(window: Window, queries: int, size: int, is_striped: bool) -> tuple[int, int]:
    """Return (keys that kernels read for each query, how many need a mask) of the last rank: with the keys of one
    rank in stripes, else with all visible keys."""
    at, stride, num_keys = (size - 1, size, queries) if is_striped else ((size - 1) * queries, 1, size * queries)
    positions, keys, length = Positions(at, queries, stride), Positions(0, num_keys, stride), queries * size
    num_masked = sum(piece.kind == "masked" for piece in window.pieces(positions, keys, length))
    return max(round(window.pairs(positions, keys, length) / queries), 1), num_masked
