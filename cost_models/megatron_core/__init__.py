"""What Megatron-Core keeps on a rank, tensor by tensor: the memory of its profile, to the byte where it can be.

Facts are those of NVIDIA/Megatron-LM at d98e8a64dd, named by their files under `megatron/`; what could only be read off
measured rows says so.
"""

from cost_models.megatron_core.memory import RankMemory, rank_memory
from cost_models.megatron_core.setup import Block, LatentAttention, Mamba, Model, Setup

__all__ = ["Block", "LatentAttention", "Mamba", "Model", "RankMemory", "Setup", "rank_memory"]
