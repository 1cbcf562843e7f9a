"""The terms of a prediction in addition to cluster and strategy, and the prices that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.costs.framework_kernels import FrameworkKernels
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.strategies.scored_model import ScoredModel
from autopar.strategies.strategy import Strategy
from cost_models.framework_profiles import HOST_SECONDS, Framework, framework
from cost_models.mixed_cluster import AnyCluster


@dataclass(frozen=True, slots=True)
class Terms:
    """A framework's profile as it is used."""

    framework: Framework
    attention: str
    matmul_dtype: str
    kernels: bool = False

    @property
    def is_planners(self) -> bool:
        """Return whether these are the terms of searched plans."""
        return replace(self, kernels=False) in (PLANNERS, replace(PLANNERS, matmul_dtype="fp32"))

    @property
    def without_host(self) -> Terms:
        """Return the terms that layers are priced by: the host's seconds come on top of whole stages."""
        seconds: dict[str, Any] = dict.fromkeys(HOST_SECONDS, 0.0)
        return replace(self, framework=replace(self.framework, **seconds))


PLANNERS = Terms(framework("autopar"), framework("autopar").attention, "bf16")


def priced_under(plain: Pricer, terms: Terms, model: ScoredModel) -> Pricer:
    """Return the prices under the profile; the planner's prices where it is the profile of generated programs."""
    if terms.is_planners:
        return plain
    profile = terms.framework
    rates = replace(
        plain.rates,
        hidden_fraction=plain.rates.hidden_fraction if profile.hides_by_share else 0.0,
        fragmentation=plain.rates.fragmentation if profile.name == "autopar" else 0.0,
        overlap_share=0.0,
        host_call_seconds=0.0,
        is_compiled=False,
    )
    kernels = FrameworkKernels(
        profile=profile,
        parts=model.parts(profile.fusion),
        matmul_dtype=terms.matmul_dtype,
        attention=terms.attention,
    )
    return Pricer(rates, framework=kernels)


def has_kernels(wanted: Strategy, cluster: AnyCluster, terms: Terms, model: ScoredModel) -> bool:
    """Return whether the fused kernels of generated programs are priced. Raises ConstraintError if a strategy asks for
    kernels that the framework lacks."""
    can = terms.is_planners
    if wanted.kernels == "on" and not can:
        raise ConstraintError(
            "only generated programs have these kernels",
            values=f"framework {terms.framework.name}, attention {terms.attention}, {terms.matmul_dtype}",
            alternatives="framework autopar in bf16 or fp32 with flash attention, or no kernels in the strategy",
        )
    return can and wanted.kernels != "off" and (wanted.kernels == "on" or not is_cpu(cluster.groups[0]))
