"""What is counted of each unit of the model's chain (autopar/ir/chain.py).

Every price of search_space.py falls into exactly one unit: a call's into its own, a reshard's into its reader's (into
its maker's where several read what was made once), a parameter's into that of its first use.

What calls do is counted in evaluate.py and recompute_modes.py, what parameters cost in stored_costs.py, and
cost_table.py has both together.
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
"""What a host needs to issue calls beyond what its device needs to run them (host_calls.py)."""
WAITED = 0.75
"""What a second in which a device waits for its host counts where plans are chosen. The rest is the device's: of plans
that wait for as long, the one that works its devices least is taken, and one that has them do d seconds more must be
d / 3 faster. The rate of a host's calls is far less sure than a device's, and compiled graphs take it away."""
FIXED_KINDS = ("parameters", "gradients", "optimizer state")
MODES = ("none", "offload", "selective", "full")
"""What a layer keeps for its backward: everything; everything, but with the host; the results of its matmuls and
attention; only its inputs."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A layer under one recompute mode. seconds: more per micro-batch, in the backward. kept_bytes: per micro-batch in
    flight. transient_bytes: while the layer runs, beside what is kept. live: the same step by step."""

    seconds: float
    kept_bytes: float
    transient_bytes: float
    live: Liveness = Liveness()


@dataclass(frozen=True, slots=True)
class ComputeSeconds:
    """Seconds of a unit per micro-batch. forward, backward: of one each. weight: of backward, weight gradients of
    linear layers. overlapped: of sums beside weight gradients, which are not in `backward` unless these are deferred.
    host: what forward and backward take to be issued.
    """

    forward: float
    backward: float
    weight: float
    overlapped: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)

    def under(
        self, schedule: str, num_forwards: int, exposed: float = 0.0, stored: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """Seconds of all forwards of a micro-batch and its backward under a schedule, those of waiting at WAITED.
        exposed: of the traffic of its parameters; stored: what these take to be issued."""
        late = self.late(exposed, stored)
        beside = max(self.overlapped - late, 0.0) if defers_weights(schedule) else 0.0
        return self.ahead(num_forwards, stored) + self.backward + exposed + WAITED * late + beside

    def ahead(self, num_forwards: int, stored: tuple[float, float] = (0.0, 0.0)) -> float:
        """Of `under`, seconds of all forwards."""
        return num_forwards * (self.forward + WAITED * max(self.host[0] + stored[0] - self.forward, 0.0))

    def late(self, exposed: float, stored: tuple[float, float]) -> float:
        """Seconds of backward in which the device waits for its host."""
        return max(self.host[1] + stored[1] - self.backward - exposed, 0.0)


@dataclass(slots=True)
class LayerCost:
    """Seconds by kind and bytes of one rank for one unit.

    forward, backward: per micro-batch. step: once per step. fixed: bytes that stay, by kind. live: what is alive while
    it runs and what it keeps without recomputation, with copies of resharded tensors that several calls keep;
    gathered_bytes: whole parameters and gradients while they are gathered; slots: of each trained parameter.
    weight_seconds: the part of backward that only makes weight gradients of linear layers and can be deferred;
    deferring_seconds: what that costs. overlapped: seconds by kind of sums that run beside these (overlap.py) and are
    not in backward, unless they are deferred. modes: for layers. host: seconds in which forward and backward can be
    issued; those beyond the device's are among them as `HOST` once parameters are (cost_table.py).
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
        """Forward and backward as choices count them."""
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
        """The most that is alive for a moment beside what is kept, and what is gathered."""
        return max(self.live.forward, self.live.waiting) - self.live.kept + self.gathered_bytes


def defers_weights(schedule: str) -> bool:
    """Whether a schedule defers weight gradients, so that nothing is left beside which sums could run."""
    return schedule_named(schedule).defers_weights


def exposed(seconds: Mapping[str, float]) -> float:
    """Seconds in which nothing else runs."""
    return sum(value for kind, value in seconds.items() if kind != HIDDEN)


def chosen_seconds(seconds: Mapping[str, float]) -> float:
    """The same where a plan is chosen: waiting for the host counts WAITED of itself."""
    return exposed(seconds) - (1.0 - WAITED) * seconds.get(HOST, 0.0)
