"""The costs of one unit of the model's chain (autopar/ir/chain.py).

Every price of search_space.py falls into exactly one unit. A call's price goes to the call's unit, a parameter's to
that of its first use. A reshard's goes to its reader's unit, or to its producer's if several read one result.

evaluate.py and recompute_modes.py count the costs of calls, stored_costs.py those of parameters; cost_table.py has
both together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costs.liveness import Liveness
from autopar.costs.peak import Slot
from cost_models.schedule import schedule_named

SYNCHRONISATION = "gradient and parameter synchronisation"
HIDDEN = "hidden communication"
ACCUMULATION = "gradient accumulation"
QUANTISING = "quantising for compressed collectives"
ROUNDING = "masters rounded for gathers"
RECOMPUTATION = "recomputation"
FIRST_PASS = "first pass for sums over the batch"
SUMS = "sums over the batch"
FETCHING = "activations to and from the host"
HOST = "waiting for the host"
"""The seconds that a host needs to issue calls beyond its device's seconds to run them (host_calls.py)."""
WAITED = 0.75
"""The weight of a second in which a device waits for its host, when plans are chosen; the rest is the device's.

Of plans that wait equally long, the search chooses the plan with the least device work. A plan with d more device
seconds must be d / 3 faster. The rate of a host's calls is far less sure than a device's, and compiled graphs remove
it.
"""
FIXED_KINDS = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, slots=True)
class Mode:
    """A layer under one recompute mode. seconds: extra backward seconds per micro-batch. kept_bytes: per micro-batch
    in flight. transient_bytes: extra bytes while the layer runs. live: the same step by step."""

    seconds: float
    kept_bytes: float
    transient_bytes: float
    live: Liveness = Liveness()


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """Seconds of a unit per micro-batch. forward, backward: of one each. weight: of backward, weight gradients of
    linear layers. overlapped: of sums that overlap weight gradients; `backward` has them only if these are
    deferred. host: to issue forward and backward."""

    forward: float
    backward: float
    weight: float
    overlapped: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)

    def under(
        self, schedule: str, num_forwards: int, exposed: float = 0.0, stored: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """Return the seconds of all forwards of a micro-batch and its backward under a schedule. A second of waiting
        counts WAITED seconds.

        exposed: of the traffic of its parameters; stored: the host's seconds to issue that.
        """
        late = self.late(exposed, stored)
        beside = max(self.overlapped - late, 0.0) if defers_weights(schedule) else 0.0
        return self.ahead(num_forwards, stored) + self.backward + exposed + WAITED * late + beside

    def ahead(self, num_forwards: int, stored: tuple[float, float] = (0.0, 0.0)) -> float:
        """Return the forwards' share of `under`."""
        return num_forwards * (self.forward + WAITED * max(self.host[0] + stored[0] - self.forward, 0.0))

    def late(self, exposed: float, stored: tuple[float, float]) -> float:
        """Return the seconds of backward in which the device waits for its host."""
        return max(self.host[1] + stored[1] - self.backward - exposed, 0.0)


@dataclass(slots=True)
class LayerCost:
    """Seconds by kind and bytes of one rank for one unit.

    forward, backward: per micro-batch. step: once per step. fixed: constant bytes, by kind. live: bytes while it
    runs and bytes kept without recomputation, with copies of resharded tensors that several calls keep.
    gathered_bytes: complete parameters and gradients while they are gathered. slots: of each trained parameter.
    weight_seconds: the deferrable part of backward: weight gradients of linear layers. deferring_seconds: the cost
    of deferral. overlapped: seconds by kind of sums that overlap these (overlap.py); backward has them only if these
    are deferred. modes: for layers. host: seconds to issue forward and backward; once parameters are included
    (cost_table.py), the seconds beyond the device's appear in both as `HOST`.
    """

    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    live: Liveness = Liveness()
    gathered_bytes: float = 0.0
    slots: tuple[Slot, ...] = ()
    weight_seconds: float = 0.0
    deferring_seconds: float = 0.0
    overlapped: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    modes: dict[str, Mode] = field(default_factory=dict)
    host: tuple[float, float] = (0.0, 0.0)

    @property
    def forward_seconds(self) -> float:
        return exposed(self.forward)

    @property
    def backward_seconds(self) -> float:
        return exposed(self.backward)

    @property
    def chosen_seconds(self) -> float:
        """Return forward and backward seconds as plan choice counts them."""
        return chosen_seconds(self.forward) + chosen_seconds(self.backward)

    @property
    def step_seconds(self) -> float:
        return exposed(self.step)

    @property
    def overlapped_seconds(self) -> float:
        return sum(self.overlapped.values())

    @property
    def fixed_bytes(self) -> float:
        return sum(self.fixed.values())

    @property
    def transient_bytes(self) -> float:
        """Return the peak of bytes, without kept and gathered ones."""
        return max(self.live.forward, self.live.waiting) - self.live.kept + self.gathered_bytes


def defers_weights(schedule: str) -> bool:
    """Return whether a schedule defers weight gradients. No sums can overlap them then."""
    return schedule_named(schedule).defers_weights


def exposed(seconds: Mapping[str, float]) -> float:
    """Return the seconds in which nothing else runs."""
    return sum(value for kind, value in seconds.items() if kind != HIDDEN)


def chosen_seconds(seconds: Mapping[str, float]) -> float:
    """Return the same for plan choice: waiting for the host counts WAITED of itself."""
    return exposed(seconds) - (1.0 - WAITED) * seconds.get(HOST, 0.0)
