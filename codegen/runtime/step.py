"""One training step of a generated program: micro-batches, gradient synchronization, clipping, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import watch
from .batch_checks import BatchCheck, LocalBatch
from .by_hand import ByHand
from .evaluation import evaluate_with_logits, evaluating, require_evaluation
from .executor import Accumulation, Executor
from .mesh import Mesh
from .non_finite import Guard, NonFinite
from .optimizers import Factory, GlobalParameter, is_elementwise, settings_of, untried
from .options import check_rates, check_step, require_argument
from .precision import Precision
from .rng_state import RngState
from .stage_module import PartOptions, Source
from .step_state import StepState
from .update import Update, parameters_of_programs, rank_optimizer
from .zero import ZeroUnits

if TYPE_CHECKING:
    # Each is beside those programs only that use it.
    from .captured import Captured, Inputs
    from .compiled_layers import CompiledLayers
    from .fused_update import FusedUpdate
    from .host_optimizer import HostOptimizer
    from .loss_scale import LossScale, LossScaling
    from .offload import Offload
    from .sharing import Programs, Shared
    from .step_protocols import FirstCheck, Trial
    from .whole_updates import WholeUpdates


_FREE = ("num_samples", "grad_norm", "first_check", "state_check", "after_forward", "loaded_states")
"""Attributes of a step that may be set."""


class Step(StepState):
    """A program made runnable on this rank: `loss = step(local_batch)` trains one step.

    program: the generated root class, or a Pipeline, whose `create_mesh` made the mesh. executor: how its micro-batches
    run; of a Pipeline `partial(PipelineExecutor, schedule=...)`.
    optimizer_factory: takes a list of tensors that answer as the whole parameters of the model do (or of (name,
    tensor), see `optimizers.call`) and returns a torch optimizer of some of them; what it leaves out is not trained.
    What this rank stores then takes their places (fp32 for half-precision models). parameters: the model's trainable
    parameters in its own order, where that matters to the factory; by default as the program has them. trial: finds out
    what the update of an optimizer needs and what its checkpoints would lack; not needed for AdamW, Adam and SGD.
    Raises OptimizerError for a factory that cannot be honoured.
    precision: "bf16" and "fp16" compute in that with fp32 masters and fp32 gradient reduction. loss_scaling: how the
    loss is scaled in fp16, which needs it. max_grad_norm: clips by the global norm of unscaled gradients (inf: only
    computes it). All ranks must make the same calls.
    offload: moves the saved activations of layers that say so; its `traffic` counts the bytes of a step.
    units: allocates the parameters of a module: `ZeroUnits`, or `ShardedUnits` under ZeRO-3, and with a host or a
    compression.
    offload_optimizer: keeps the optimizer's state and the masters in host memory or files, and updates there.
    captured: replays the work on the device as CUDA graphs, where it can.
    compiled: compiles what layers compute between collectives. kernels: where they can run, the gradient's norm is one
    launch, and so is the update of a `FusedAdamW` on the device, clipping included: gradients then stay as they are.
    non_finite: what becomes of a step whose loss or gradient norm is inf or nan (`non_finite.py`): "skip" it, "stop",
    or "ignore" that. The others read both numbers once per step, before the update, and return the loss on the host. In
    fp16 that is read in any case, and a step whose scaled gradients overflow is skipped without counting as one. A loss
    that is not finite counts, and so do gradients that are not finite at a scale of 1 or below.
    shared: of a step of the same plan for batches of other shapes, whose parameters, buffers, optimizer and position
    this one uses; that one's `take_also` then lets it run batches of its own shapes.
    """

    def __init__(
        self,
        program: Any,
        mesh: Mesh,
        *,
        executor: Callable[[Any, Mesh, RngState, PartOptions], Executor] = Accumulation,
        optimizer_factory: Factory,
        parameters: Sequence[GlobalParameter] = (),
        trial: Trial | None = None,
        num_micro_batches: int = 1,
        precision: Precision = "fp32",
        loss_scaling: LossScale | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        units: Callable[..., ZeroUnits] = ZeroUnits,
        offload: Offload | None = None,
        offload_optimizer: HostOptimizer | None = None,
        captured: Captured | None = None,
        compiled: CompiledLayers | None = None,
        kernels: FusedUpdate | None = None,
        non_finite: NonFinite = "skip",
        shared: Shared | None = None,
    ) -> None:
        check_step(num_micro_batches, precision, max_grad_norm, seed, has_loss_scale=loss_scaling is not None)
        self.mesh, self.num_micro_batches = mesh, num_micro_batches
        self.precision, self.max_grad_norm = precision, max_grad_norm
        self.rng: RngState = RngState(seed=seed) if shared is None else shared.rng
        self.offload, self.host_optimizer = offload, offload_optimizer
        begun_scaling = None if loss_scaling is None else loss_scaling.begin()
        self.loss_scaling: LossScaling | None = begun_scaling if shared is None else shared.loss_scaling
        options = PartOptions(
            units=units if shared is None else shared.units,
            precision=precision,
            num_micro_batches=num_micro_batches,
            offload=offload,
            loss_scaling=self.loss_scaling,
        )
        self._replay_with(captured=captured if shared is None else shared.captured)
        with nullcontext() if self._captured is None else self._captured.on_stream():
            self._executor = executor(program, mesh, self.rng, options)
        self._compiled, programs, models = compiled, self._executor.programs, [part.model for part in self.parts]
        self._batch = BatchCheck(programs, models, mesh, num_micro_batches)
        if compiled is not None:
            compiled.attach(models)
        self.first_check: FirstCheck | None = None
        # Called before a batch with whether it is trained, and with None before values are read.
        self.state_check: Callable[[bool | None], object] | None = None
        self.after_forward: Callable[[bool], object] | None = None  # the same, after a batch
        if shared is not None:
            self.optimizer: torch.optim.Optimizer = shared.optimizer
            return
        self._trial = trial
        self._made_with: tuple[Factory, Sequence[GlobalParameter]] = (
            optimizer_factory,
            parameters or tuple(parameters_of_programs(programs)),
        )
        self._begin(non_finite, kernels=kernels)

    def _begin(self, non_finite: NonFinite, *, kernels: FusedUpdate | None) -> None:
        """Make the optimizer and the update. The run begins at its first step."""
        self.wholes = None if self._trial is None else self._whole_updates()
        host = self.host_optimizer
        device = self.mesh.device if host is None else "cpu"
        self.optimizer = rank_optimizer(*self._made_with, self.parts, device, wholes=self.wholes)
        self.settings = settings_of(self.optimizer)
        self._require_known()
        if host is not None:
            host.attach(self.optimizer, self.buckets)
        self._update = Update(
            self.parts,
            self.mesh,
            self.optimizer,
            max_grad_norm=self.max_grad_norm,
            host=host,
            wholes=self.wholes,
            kernels=kernels,
        )
        self._by_hand = ByHand(self.parts, self.optimizer, wholes=self.wholes)
        self.num_samples, self._num_rows = 0, 0
        written = [value for part in self.parts for value in part.written_buffers()]
        self.guard = Guard(non_finite, written, loss_scaling=self.loss_scaling)
        self.grad_norm: Tensor | None = None
        """Global norm of the last step's unscaled gradients before clipping (0-dim), where something needs it."""

    def _replay_with(self, *, captured: Captured | None) -> None:
        """Run the work on the device as these graphs."""
        self._captured = captured
        if captured is not None and captured.is_on:
            self.rng.on_device = self.rng.on_device or captured.keys

    _programs: Programs | None = None
    """All programs that the step runs, where there are several."""

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError for what the step was made with: a new optimizer, say, would be ignored."""
        is_free = name.startswith("_") or name in _FREE
        if name in self.__dict__ and not is_free:
            raise AttributeError(f"step.{name} is what the step was made with, and cannot be set: build another step")
        super().__setattr__(name, value)

    def take_also(self, other: Step, source: Source) -> None:
        """Train and evaluate batches of the shapes of `other` too, a step that was made with shared=Shared(this one).

        source: as in `load`, for buffers whose shapes are those of its batches.
        """
        from .sharing import Programs  # which most programs do without

        self._programs = self._programs or Programs(self)
        self._programs.add(other, source)
        self.forget_graphs()  # parameters may have moved

    def run_instead(self, current: Step, other: Step, source: Source) -> None:
        """Run `other`, a step as `take_also` takes them, in the place of `current`: this one, or one that it took."""
        self.take_also(other, source)
        assert self._programs is not None
        self._programs.replace(current)

    def train_also(self) -> None:
        """Let the optimizer update parameters that the parts got since it was made, as its factory has them."""
        new_optimizer = rank_optimizer(*self._made_with, self.parts, self.mesh.device)
        for group, new in zip(self.optimizer.param_groups, new_optimizer.param_groups, strict=True):
            group["params"][:] = new["params"]
            group |= {"param_names": new["param_names"]} if "param_names" in new else {}
        for parameter, state in new_optimizer.state.items():
            self.optimizer.state.setdefault(parameter, state)
        if self._update.kernels is not None:
            self._update.kernels.attach(self.parts, self.optimizer, is_offloaded=False)
        self._by_hand = self._by_hand.of_more(self.parts)
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Drop CUDA graphs, after a change of what they hold for good: code, numbers, or the places of tensors."""
        if self._captured is not None:
            self._captured.forget()

    def freeze(self, names: Collection[str]) -> None:
        """Leave these parameters out of the coming updates, as torch does those whose requires_grad is off, and no
        others. Raises ValueError where nothing is left, or the optimizer does not update each parameter by itself."""
        if all(parameter.name in names for parameter in self._made_with[1]):
            raise ValueError("no parameter is left to train")
        if names and not self.updates_by_parameter:
            raise ValueError(
                "parameters are frozen between steps only where torch's own optimizer, such as torch.optim.AdamW, "
                "updates on the device what this rank stores"
            )
        self._by_hand.leave_out(names)

    @property
    def updates_by_parameter(self) -> bool:
        """Whether torch's own optimizer updates on the device what this rank stores."""
        is_fused = self._update.kernels is not None and self._update.kernels.optimizer is not None
        return not (is_fused or self.wholes is not None or self.host_optimizer is not None)

    def takes(self, batch: Mapping[str, Any]) -> bool:
        """Whether a whole global batch has shapes that this step, or one that it was given, was made for."""
        flat = self._batch.flat(batch)
        return self._batch.takes(flat, is_local=False) if self._programs is None else self._programs.take(flat)

    def _taking(self, batch: Mapping[str, Any], is_local: bool) -> Step:
        """Return the step whose program takes the batch, or this one, whose check then says what is wrong."""
        return self if self._programs is None else self._programs.of(batch, is_local)

    def _whole_updates(self) -> WholeUpdates | None:
        """Return the updates of whole parameters, if any. Raises where ranks cannot update their own parts."""
        if self._trial is None or self.mesh.everyone.size == 1:
            return None
        is_staged, is_offloaded = len(self._executor.programs) > 1, self.host_optimizer is not None
        where = (self.parts, self.mesh)
        return self._trial.wholes(*self._made_with, *where, is_staged=is_staged, is_offloaded=is_offloaded)

    def _require_known(self) -> None:
        if self._trial is None and self.mesh.everyone.size > 1 and not is_elementwise(self.optimizer):
            raise ValueError(untried(self.optimizer))

    @cached_property
    def forgotten(self) -> str:
        """Return why checkpoints would be without a part of the optimizer's state; "" if they would not."""
        if self._trial is not None:
            return self._trial.forgotten(*self._made_with)
        return "" if is_elementwise(self.optimizer) else untried(self.optimizer)

    @property
    def loss_scale(self) -> float:
        """The factor on the next backward's gradients until they are summed: 1.0 except in fp16."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.value

    @property
    def executed(self) -> list[str]:
        """The actions of the last step or evaluation, in the order in which this rank ran them; none if no pipeline."""
        return self._executor.executed

    # Training ---------------------------------------------------------------------------------------------------------

    def __call__(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Train one step on this rank's part of the batch. Return the global mean loss (0-dim), equal on all ranks.

        local_batch: the inputs of `INPUTS`; dim 0 holds this rank's rows of each micro-batch in turn (`local_batch`
        makes it from a whole batch). Inputs that are not batched are as in `INPUTS`.
        """
        loss = self.forward_backward(local_batch)
        self._update_parameters(is_at_once=True)
        return loss if self.guard.loss is None else self.guard.loss

    @watch.noted("step {coming}")
    def forward_backward(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Run all micro-batches forward and backward, without an update. Return the global mean loss.

        Raises BatchError for a batch that the program was not made for, or that differs between ranks that share it.
        """
        if self.state_check is not None:
            self.state_check(True)
        self._by_hand.before_forward()
        if self._programs is not None:
            local_batch = self._programs.completed(local_batch)
        taking = self._taking(local_batch, is_local=True)
        taking._batch.local(local_batch, self.rng.step)
        first_check, self.first_check = self.first_check, None
        comparison = None if first_check is None else first_check(local_batch)
        if taking.offload is not None:
            taking.offload.traffic.reset()
        if self.host_optimizer is not None:
            self.host_optimizer.host.traffic.reset()
        loss, self._num_rows = self._gradients_of(taking, local_batch)
        if self.after_forward is not None:
            self.after_forward(True)
        self.guard.after_backward(loss)
        self._by_hand.after_backward()
        if comparison is not None:
            comparison(float(loss))
        return loss

    def _gradients_of(self, taking: Step, local_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return the loss of all micro-batches and the rows of the batch; gradients are reduced and unscaled."""

        def compute(inputs: Inputs) -> tuple[Tensor, int]:
            self.guard.before_forward()
            self.rng.micro_batch_rows = 0
            with taking._running(is_training=True):
                loss = taking._executor.train(inputs)
            if self.loss_scaling is not None:
                self.loss_scaling.unscale([bucket.gradient for bucket in self.buckets if bucket.key.requires_grad])
            for part in taking.parts:
                part.write_buffers()
            return loss, taking.num_micro_batches * self.rng.micro_batch_rows

        if self._captured is None:
            return compute(local_batch)
        if self.loss_scaling is not None:
            self.loss_scaling.write(self.mesh.device)
        self._write_keys()
        inputs = {name: local_batch[name] for name in taking._batch.local_inputs if name in local_batch}
        result: tuple[Tensor, int] = self._captured.run(
            ("gradients", id(taking), *((name, value.shape, value.dtype) for name, value in inputs.items())),
            compute,
            inputs,
            written=[value for part in taking.parts for value in part.written_buffers()],
            checked=lambda result: torch.stack([result[0].double(), self._update.global_norm().double()]),
            abandon=self._abandon_backward,
        )
        return result

    def _write_keys(self) -> None:
        """Write the keys of this step's random draws to the device, where they are read from there."""
        if self.rng.on_device is not None:
            self.rng.on_device.write(self.rng.seed, self.rng.step)

    def _abandon_backward(self) -> None:
        """Forget the gradients of a backward that was cut short."""
        for part in self.parts:
            part.zero.abandon()
        self.mesh.abandon()

    def _global_norm(self) -> Tensor:
        if self._captured is None:
            return self._update.global_norm()
        norm: Tensor = self._captured.run("norm", lambda _: self._update.global_norm())
        return norm

    def _apply_update(self) -> None:
        fused = None if self._update.kernels is None else self._update.kernels.optimizer
        if self._captured is None or fused is None or fused.has_hooks:
            if fused is not None:
                fused.unprepare()
            self._update.apply(self.grad_norm)
            return
        fused.prepare(self.mesh.device)
        self._captured.run(
            ("update", self._update.max_grad_norm, fused.constants()),
            lambda inputs: self._update.apply(inputs.get("norm")),
            {} if self.grad_norm is None else {"norm": self.grad_norm},
        )

    def update(self) -> None:
        """Clip the gradients, step the optimizer, and bring the new parameters to all ranks.

        A step that `non_finite` or an overflow in fp16 makes skip changes neither parameters nor the optimizer's state
        nor buffers, on any rank, but counts: the next one reads on in the data. Raises FloatingPointError where
        training is to stop, RuntimeError where a script did to gradients or optimizer what would be dropped or differ
        between ranks, and ValueError for a learning rate that no option takes.
        """
        self._update_parameters(is_at_once=False)

    @watch.noted("step.clip of step {coming}")
    def clip(self, max_norm: float) -> Tensor:
        """Let the coming update clip as `clip_grad_norm_` does (inf: not at all); the global norm before that (0-dim).
        Collective. Raises ValueError for what max_grad_norm cannot be."""
        require_argument("max_grad_norm", max_norm, "max_norm")
        self._update.max_grad_norm, self.grad_norm = float(max_norm), self._update.global_norm()
        return self.grad_norm

    @contextmanager
    def perturbed(self, rho: float) -> Iterator[None]:
        """Within it, parameters are rho away along the last gradients, as sharpness-aware minimization (SAM) wants:

            step.forward_backward(local_batch)
            with step.perturbed(0.05):
                loss = step.forward_backward(local_batch)
            step.update()

        Collective. Raises ValueError for an offloaded optimizer, RuntimeError without gradients.
        """
        if self.host_optimizer is not None:
            raise ValueError("parameters of an offloaded optimizer cannot be perturbed")
        self._by_hand.take_gradients()
        with watch.entered(f"step.perturbed of step {self.rng.step}"):
            before = self._update.perturb(rho)
        try:
            yield
        finally:
            with watch.entered(f"the end of step.perturbed of step {self.rng.step}"):
                self._update.restore(before)

    @watch.noted("the update of step {coming}")
    def _update_parameters(self, is_at_once: bool) -> None:
        check_rates(self.optimizer)
        self._by_hand.before_update(is_at_once)
        if self._update.max_grad_norm is not None or self.guard.is_on:
            self.grad_norm = self._global_norm()
        if not self.guard.is_on or self.guard.lets_pass(self.grad_norm):
            self._apply_update()
        self._update.max_grad_norm = self.max_grad_norm
        self.rng.step += 1
        self.num_samples += self._num_rows

    @overload
    def evaluate(self, local_batch: Mapping[str, Tensor], *, logits: Literal[False] = False) -> Tensor: ...
    @overload
    def evaluate(self, local_batch: Mapping[str, Tensor], *, logits: Literal[True]) -> tuple[Tensor, Tensor]: ...
    @watch.noted("step.evaluate after step {done}")
    @torch.no_grad()
    def evaluate(self, local_batch: Mapping[str, Tensor], *, logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the global mean loss (0-dim) in evaluation mode, without gradients; with logits=True return (loss, the
        model's logits of the whole batch in its order) on every rank. No state changes.
        Raises RuntimeError for a program that has no evaluation mode or no logits.
        """
        if self.state_check is not None:
            self.state_check(False)
        if self._programs is not None:
            local_batch = self._programs.completed(local_batch)
        taking = self._taking(local_batch, is_local=True)
        require_evaluation(taking._executor, logits)
        taking._batch.local(local_batch, self.rng.step)
        if self.first_check is not None:
            self.first_check.forget_part(local_batch)
        self._write_keys()
        with evaluating(taking._executor, self.rng), taking._running(is_training=False):
            result: Tensor | tuple[Tensor, Tensor]
            if logits:
                result = evaluate_with_logits(taking._executor, local_batch, self.mesh)
            else:
                result = taking._executor.evaluate(local_batch)
        if self.after_forward is not None:
            self.after_forward(False)
        return result

    def _running(self, is_training: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._compiled is None else self._compiled.running(is_training)

    def close(self) -> None:
        """Drop CUDA graphs, which must not outlive the process group, and remove the files of an offloaded optimizer,
        which happens at exit otherwise. This is the last call."""
        self.forget_graphs()
        if self.host_optimizer is not None:
            self.host_optimizer.host.close()

    def local_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of a global batch, on the mesh's device. Raises BatchError.

        Tensors may lie in containers, as forward of the original model takes them (`flat_batch`); the only input, if it
        is one, may also be given without its name.
        """
        flat = self._batch.flat(batch)
        taking = self._taking(flat, is_local=False)
        taking._batch.whole(flat, self.rng.step)
        local: dict[str, Tensor] = taking._part_of(flat)
        if taking._batch.unused or taking._batch.guards:
            unread = {name: flat[name] for name in taking._batch.unused if isinstance(flat.get(name), Tensor)}
            local = LocalBatch(local, unread, flat)
        if self.first_check is not None:
            self.first_check.note_part(local, flat, lambda: taking._part_of(self._batch.flat(batch)))
        return local

    def _part_of(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for part in self.parts for name, value in part.local_batch(flat).items()}
