"""Everything that is fixed before the stages of a pipeline are cut."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.stage_mesh import StageMesh


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """A parallel configuration with open stages.

    stage_meshes: possible meshes of pipeline ranks; one if all are equal. pipeline_ranks: their possible numbers.
    rows: of one micro-batch over all data-parallel ranks. multiplier: of the decisions (see solved_layers.py).
    offload: "", "optimizer" or "parameters". schedule: "" if that is open, too. chunks: stages of a pipeline rank.
    """

    stage_meshes: tuple[StageMesh, ...]
    pipeline_ranks: tuple[int, ...]
    rows: int
    num_micro_batches: int
    zero: int
    multiplier: float
    offload: str
    schedule: str = ""
    chunks: int = 1

    @property
    def pp(self) -> int:
        """Return the largest possible number of pipeline ranks."""
        return max(self.pipeline_ranks)

    @property
    def tp(self) -> int:
        """Return the largest tensor-parallel degree: decisions are made for it."""
        return max(stage_mesh.mesh.size("tp") for stage_mesh in self.stage_meshes)

    @property
    def sharing(self) -> tuple[int, ...]:
        """Return the degrees of the first stage mesh that decisions depend on."""
        return tuple(self.stage_meshes[0].mesh.size(axis) for axis in ("ttp", "cp", "ep", "tp"))

    def rows_on(self, stage_mesh: StageMesh) -> int:
        """Return the rows of one micro-batch on one data-parallel rank of a stage mesh."""
        return self.rows // stage_mesh.mesh.num_data_ranks

    def under(self, schedule: str, chunks: int = 1) -> ParallelConfig:
        """Return the same with a schedule."""
        # `replace` would take longer than the bound of a config.
        return ParallelConfig(
            stage_meshes=self.stage_meshes,
            pipeline_ranks=self.pipeline_ranks,
            rows=self.rows,
            num_micro_batches=self.num_micro_batches,
            zero=self.zero,
            multiplier=self.multiplier,
            offload=self.offload,
            schedule=schedule,
            chunks=chunks,
        )

    @property
    def key(self) -> tuple[int, tuple[str, ...], int, int, float, str, str]:
        """Return a key that orders equally good configs."""
        meshes = tuple(map(str, self.stage_meshes))
        return self.pp, meshes, self.num_micro_batches, self.zero, self.multiplier, self.offload, self.schedule
