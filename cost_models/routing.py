"""Expected load of the fullest rank, relative to the mean, where a group of ranks shares the experts of a layer.

A router sends each of N tokens to k of E experts; a rank has g = E / p of them, p ranks in the group. Loads are
balanced only on average (by an auxiliary loss), and differ for two reasons. First, even with equally likely experts,
the number of a token's choices on one rank is hypergeometric, of mean k g / E, and those of N tokens are independent.
Second, experts are not equally likely: their shares of all tokens have a coefficient of variation s that persists from
step to step ("skew"). Shares add up to one, so the sum over a rank's g experts varies less than that of g independent
shares:

    c^2  =  (1 - g/E) (E - k) / (E - 1) / (N k g / E)  +  s^2 (E - g) / (g (E - 1))

is the squared coefficient of variation of a rank's load. The loads of p ranks add up to N k, so any two are correlated
by -1 / (p - 1). The expected largest of p normal variables with that correlation (H. A. David, H. N. Nagaraja, "Order
statistics", 3rd edition, section 5.3) is as far above the mean as that of independent ones, m(p) deviations
(`straggler`), times sqrt(p / (p - 1)):

        F(p)  =  1 + c sqrt(p / (p - 1)) m(p)                         at most p, where one rank has all tokens

Token exchanges and expert computation take F times as long as with equal loads, because all ranks wait for the fullest
one in every layer. With a capacity factor f every expert has f N k / E slots, sends and computes all of them, filled or
not, and drops further tokens (D. Lepikhin et al., "GShard" (2020), section 2.2; S. Rajbhandari et al., "DeepSpeed-MoE"
(2022), section 5). Then the factor is f, whatever the loads.
"""

from __future__ import annotations

import math

from cost_models.straggler import expected_maximum

EXPERT_SKEW = 0.26
"""s under an auxiliary loss: L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
(2024), table 2: over a whole validation set the fullest of 64 experts gets 0.72 (1B) and 0.52 (3B) more than the mean.
s m(64) equals that excess, with m(64) = 2.34. With their loss-free balancing it is 0.04: s = 0.02."""


def fullest_load(num_ranks: int, num_experts: int, num_choices: int, num_tokens: float, skew: float) -> float:
    """Return F(p): the expected tokens of the fullest of `num_ranks` ranks, relative to the mean.

    num_tokens: of all ranks of the group together, each sent to num_choices of num_experts experts. Raises ValueError
    if the ranks do not divide the experts, for more choices than experts, no tokens, or a negative skew.
    """
    local_experts, rest = divmod(num_experts, num_ranks)
    if rest or not 1 <= num_choices <= num_experts or not num_tokens > 0 or not skew >= 0:
        raise ValueError(
            f"cannot route {num_tokens} tokens to {num_choices} of {num_experts} experts on {num_ranks} ranks, "
            f"skew {skew}"
        )
    if num_ranks == 1:
        return 1.0
    share = local_experts / num_experts
    by_chance = (1 - share) * (num_experts - num_choices) / (num_experts - 1) / (num_tokens * num_choices * share)
    by_skew = skew**2 * (num_experts - local_experts) / (local_experts * (num_experts - 1))
    deviations = expected_maximum(num_ranks) * math.sqrt(num_ranks / (num_ranks - 1))
    return min(1.0 + math.sqrt(by_chance + by_skew) * deviations, float(num_ranks))
