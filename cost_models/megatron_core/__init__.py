"""Memory of a rank of Megatron-Core, tensor by tensor, exact to the byte where possible.

Facts are those of NVIDIA/Megatron-LM at d98e8a64dd, named by their files under `megatron/`. Facts that could only be
inferred from measured rows say so.
"""

from cost_models.megatron_core.memory import RankMemory, rank_memory
from cost_models.megatron_core.setup import Block, LatentAttention, Mamba, Model, Setup

__all__ = ["Block", "LatentAttention", "Mamba", "Model", "RankMemory", "Setup", "rank_memory"]
