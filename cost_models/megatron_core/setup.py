"""A model and a parallel configuration in Megatron-Core's terms: the input of `rank_memory`."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = ("attention", "cross", "mlp", "moe", "mamba", "prediction")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Names of Megatron-Core's --recompute-modules."""
OFFLOADS = ("attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")
"""Names of its --offload-modules."""
ATTENTIONS = ("unfused", "fused", "flash")
PRECISIONS = ("bf16", "fp16", "fp8")
GENERATIONS = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-latent attention (DeepSeek-V2): ranks of the two compressions, and features per head."""

    q_rank: int
    kv_rank: int
    qk_features: int
    position_features: int
    v_features: int


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of a Mamba-2 mixer."""

    heads: int
    head_features: int
    states: int
    groups: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_features


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a model whose blocks of one kind are alike.

    vocab: the tokenizer's size; it is padded to a multiple of vocab_multiple x tp. positions: of a learned table, 0
    without one. family: "gpt", "bert" and "t5" differ in their heads. expert_ffn, shared_ffn: features within one
    expert and within the shared experts. extra_predictions: layers of multi-token prediction, each with its own loss.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_features: int
    ffn: int
    vocab: int
    vocab_multiple: int = 128
    family: str = "gpt"
    gated: bool = False
    has_bias: bool = True
    rms_norm: bool = False
    tied: bool = True
    positions: int = 0
    experts: int = 0
    top_k: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    extra_predictions: int = 0
    latent: LatentAttention | None = None
    mamba: Mamba | None = None

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the table of words that `tp` ranks share."""
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Block:
    """A residual block of a layer: its kind, a rank's positions of a sequence (queries), and the positions they attend
    to (keys)."""

    kind: str
    queries: int
    keys: int

    def __post_init__(self) -> None:
        if self.kind not in BLOCKS:
            raise ValueError(f"a block must be one of {', '.join(BLOCKS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One rank of a pipeline stage, by default of the last stage.

    chunks: its blocks by virtual stage. stage: the rank's position in a pipeline of pp, -1 for the last. dp: replicas
    of the whole model, without context-parallel ranks. micro_batches: per step and replica. group: micro-batches that
    an interleaved schedule runs through a virtual stage before the next (0: pp). implementation: "te" or "local",
    Megatron-Core's own layers. fused_softmax: unfused attention computes scale, mask and softmax in one kernel.
    fused_wgrad: the matmuls that compute weight gradients add them to the sums. fused_loss: the loss is a compiled
    function. sharded_parameters: Megatron-FSDP shards parameters and gradients as a distributed optimizer shards its
    state. overlapped_tp: tensor-parallel products are split to overlap their communication. deferred_wgrads:
    micro-batches whose gradient of the table of words is deferred to the end. whole_parameters: a distributed optimizer
    assigns whole parameters to ranks. optimizer_instances: groups of replicas that each have a full distributed
    optimizer. optimizer_bytes: per parameter, of its fp32 copy and both moments. host_optimizer: the share of these on
    the host. half_gradients: gradients are summed in 16 bits. shared_blocks: number of last blocks that share the
    parameters of earlier blocks. dense_mask: batches contain a mask of [rows, 1, positions, positions]. recompute:
    names of modules, or "full" for whole layers. offload: names of modules whose activations are on the host.
    generation: of the GPU, which determines scratch memory.

    Raises ValueError for unknown words, a stage outside the pipeline, and a rank without blocks.
    """

    chunks: tuple[tuple[Block, ...], ...]
    micro_batch: int
    tp: int = 1
    pp: int = 1
    stage: int = -1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    micro_batches: int = 1
    group: int = 0
    precision: str = "bf16"
    implementation: str = "te"
    attention: str = "unfused"
    fused_softmax: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    sharded_parameters: bool = False
    optimizer: str = "adam"
    fused_wgrad: bool = False
    fused_loss: bool = False
    overlapped_tp: bool = False
    deferred_wgrads: int = 0
    whole_parameters: bool = False
    optimizer_instances: int = 1
    shared_blocks: int = 0
    half_gradients: bool = False
    optimizer_bytes: int = 12
    host_optimizer: float = 0.0
    has_fp8_parameters: bool = False
    deterministic: bool = False
    dense_mask: bool = True
    dispatcher: str = "allgather"
    grouped_experts: bool = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    generation: str = "hopper"

    def __post_init__(self) -> None:
        words = (("attention", ATTENTIONS), ("precision", PRECISIONS), ("generation", GENERATIONS))
        for key, legal in words:
            if getattr(self, key) not in legal:
                raise ValueError(f"{key} must be one of {', '.join(legal)}, got {getattr(self, key)!r}")
        if not -1 <= self.stage < self.pp:
            raise ValueError(f"stage must be below pp, got {self.stage} of {self.pp}")
        if not self.blocks:
            raise ValueError("a rank must have a block")
        for names, allowed in ((self.recompute, (*MODULES, "full")), (self.offload, OFFLOADS)):
            if unknown := [name for name in names if name not in allowed]:
                raise ValueError(f"modules must be of {', '.join(allowed)}, got {', '.join(unknown)}")

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for chunk in self.chunks for block in chunk)

    @property
    def stored_blocks(self) -> tuple[Block, ...]:
        """Return the blocks with their own parameters."""
        blocks = self.blocks
        return blocks[: len(blocks) - self.shared_blocks]

    @property
    def split(self) -> int:
        """Count the ranks that shard activations between tensor-parallel matrices."""
        return self.tp if self.sequence_parallel else 1

    @property
    def is_first(self) -> bool:
        """Whether the rank looks up words."""
        return self.pp == 1 or self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank has the loss."""
        return self.stage in (-1, self.pp - 1)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """List the virtual stage of each forward pass that is kept when the first backward pass starts.

        1F1B keeps as many as there are stages from this one on. Interleaved keeps two for each later stage, and a group
        for each virtual stage but the last (D. Narayanan et al., SC 2021, section 2.2; get_pp_rank_microbatches in
        core/pipeline_parallel/schedules.py). Groups pass through one virtual stage after the other.
        """
        virtual, later = len(self.chunks), self.pp - 1 - self.stage % self.pp
        if virtual == 1:
            return (0,) * min(later + 1, self.micro_batches)
        group = min(self.group or self.pp, self.micro_batches)
        number = min(2 * later + (virtual - 1) * group + 1, virtual * self.micro_batches)
        return tuple(index // group % virtual for index in range(number))
