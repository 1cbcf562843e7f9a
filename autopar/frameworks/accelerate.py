"""Accelerate's loop around an autopar program: `accelerator = parallelize(Accelerator(), "8 h100-sxm")`.

The rest of the script stays: `prepare`, `model(**batch).loss`, `accelerator.backward(loss)`, `clip_grad_norm_`,
`optimizer.step()`. The program's step runs forward and backward at once, so a call of the model in training mode runs
both on the whole global batch. `backward` then checks that the script asks for these gradients. Batches are those of
one process: every rank's loader yields the whole batch, and the losses are those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from autopar.errors import CheckpointError, ConstraintError
from autopar.frameworks.accelerate_classes import ProgramAccelerator, stand_in
from autopar.frameworks.building import (
    SameOptimizer,
    build_learner,
    check_rows,
    config_of,
    first_step,
    move_schedule,
    named,
    rows_of_steps,
)
from autopar.frameworks.loops import LoopOptimizer, ModelValues, PendingLoss
from autopar.training.config import TrainerConfig
from autopar.training.learners import RankLearner
from codegen.runtime.processes import Ending
from cost_models.mixed_cluster import AnyCluster

STATE_FOLDER = "autopar"
"""The folder beside Accelerate's files in which `save_state` writes the program's state."""
LAST_FOLDER = "last"
"""The project's folder for the state of a run that ends on SIGTERM, where checkpoints have no numbers."""


def parallelize(accelerator: Accelerator, cluster: AnyCluster | str, **options: Any) -> ProgramAccelerator:
    """Return the accelerator; its `prepare` now plans a program for the model, its optimizer and the first loader.

    cluster: as in `autopar.compile`, or "detect". options: the options of the plan (`precision`, `constraints`, `plan`,
    `backend`, ...), as autopar.TrainerConfig has them, and `seed` of dropout.
    Raises ConstraintError for an accelerator with parallelism, precision or accumulation of its own.
    """
    if accelerator.gradient_accumulation_steps != 1:
        count = accelerator.gradient_accumulation_steps
        raise ConstraintError(
            "gradients are not accumulated over calls of the model",
            values=f"gradient_accumulation_steps={count}",
            alternatives=f"a loader with {count} times the rows: the plan splits them as memory requires",
        )
    seed = options.pop("seed", 0)
    config = config_of(cluster, seed, options)
    program_accelerator = cast(LoopAccelerator, stand_in(accelerator, LoopAccelerator))
    program_accelerator.config_of_program, program_accelerator.program_model = config, None
    return program_accelerator


class LoopAccelerator(ProgramAccelerator):
    """An accelerator whose `prepare` builds a program."""

    config_of_program: TrainerConfig
    program_model: ProgramModel | None

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Replace the model, optimizer, loaders and schedules by the program's. The first loader is the training one.
        Collective.

        Raises ConstraintError unless the first call has a model, its optimizer and its loader, and subclasses of
        AutoparError where no program can be planned.
        """
        models = [item for item in objects if isinstance(item, nn.Module)]
        if self.program_model is None:
            objects = self._with_program(objects, models)
        elif models:
            raise ConstraintError(
                "an accelerator has one program", values=f"another model, {type(models[0]).__name__}",
                alternatives="another process, or autopar.compile and a loop of your own",
            )  # fmt: skip
        prepared = tuple(self._prepared(item) for item in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def _with_program(self, objects: tuple[Any, ...], models: list[nn.Module]) -> tuple[Any, ...]:
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        loaders = [item for item in objects if isinstance(item, torch.utils.data.DataLoader)]
        if len(models) != 1 or len(optimizers) != 1 or not loaders:
            raise ConstraintError(
                "the first prepare() needs one model, its optimizer and its training loader, which make the program",
                values=", ".join(type(item).__name__ for item in objects),
                alternatives="accelerator.prepare(model, optimizer, loader, scheduler)",
            )
        model, optimizer = models[0], optimizers[0]
        model.to("cpu").train()
        factory = SameOptimizer(optimizer, model)
        prepared = self.prepare_data_loader(loaders[0])
        learner = build_learner(model, self.config_of_program, factory, first_step(prepared, 1))
        check_rows(learner, {rows for loader in loaders for rows in rows_of_steps(loader, 1)})
        self.program_model = ProgramModel(learner)
        if self.project_dir is not None:
            self.program_model.before_step = partial(self._end_if_told, Ending(learner.step.mesh.device))
        loop_optimizer = LoopOptimizer(learner, self.program_model.values, self.program_model.pending)
        self.program_model.loop_optimizer = loop_optimizer
        replaced = {id(model): self.program_model, id(optimizer): loop_optimizer, id(loaders[0]): prepared}
        for item in objects:
            if getattr(item, "optimizer", None) is optimizer:
                move_schedule(item, optimizer, loop_optimizer)
        return tuple(replaced.get(id(item), item) for item in objects)

    def _prepared(self, item: Any) -> Any:
        """Return the loop's form of one object: loaders of one process, schedules that step once per update."""
        if isinstance(item, LoopOptimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, torch.optim.Optimizer):
            raise ConstraintError(
                "a program has one optimizer", values=f"another {type(item).__name__}", alternatives="prepare it once"
            )
        if isinstance(item, torch.utils.data.DataLoader):
            return self.prepare_data_loader(item)
        is_schedule = hasattr(item, "optimizer") and hasattr(item, "step")
        return self.prepare_scheduler(item) if is_schedule else item

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Take the gradients of the loss for the update, as loss.backward() does. Raises RuntimeError for a loss that
        is not the model's."""
        if self.gradient_accumulation_steps != 1:
            raise ConstraintError(
                "gradients are not accumulated over calls of the model",
                values=f"gradient_accumulation_steps={self.gradient_accumulation_steps}",
                alternatives="gradient_accumulation_steps=1",
            )
        cast(Any, loss).backward(**options)

    def accumulate(self, *models: Any) -> Any:
        """Return a context in which every step is an update."""
        return super().accumulate()

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> nn.Module:
        """Return the script's model with the values trained so far. Every rank calls this."""
        if not isinstance(model, ProgramModel):
            return cast(nn.Module, super().unwrap_model(model, *args, **options))
        return model.whole()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole state of the model. Every rank calls this."""
        return self.unwrap_model(model).state_dict()

    def save_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Write the whole model, once. Every rank calls this."""
        return super().save_model(self.unwrap_model(model), *args, **options)

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Write schedules, random states and registered objects as Accelerate does, and in a folder `autopar` the
        program's state, from which any plan can resume. Every rank calls this. Raises CheckpointError."""
        learner = self._model_of_program("save_state").learner
        learner.check()
        with self._optimizer_hidden():
            folder = super().save_state(*args, **options)
        learner.save(Path(folder) / STATE_FOLDER, {})
        return folder

    def _end_if_told(self, ending: Ending) -> None:
        """Write the state and exit with code 143 where a rank got SIGTERM. Collective."""
        if ending.is_told():
            is_numbered = self.project_configuration.automatic_checkpoint_naming
            self.save_state(None if is_numbered else str(Path(self.project_dir) / LAST_FOLDER))
            raise SystemExit(Ending.EXIT_CODE)

    def load_state(self, *args: Any, **options: Any) -> None:
        """Resume from a folder of `save_state`. Every rank calls this. Raises CheckpointError for another folder."""
        self._model_of_program("load_state")
        hook = self.register_load_state_pre_hook(self._load_program)  # it gets the folder that Accelerate chose
        try:
            with self._optimizer_hidden():
                super().load_state(*args, **options)
        finally:
            hook.remove()

    def _load_program(self, models: Any, folder: str) -> None:
        state, model = Path(folder) / STATE_FOLDER, self._model_of_program("load_state")
        if not state.is_dir():
            raise CheckpointError(
                "the folder has no state of a program",
                values=f"{folder} without {STATE_FOLDER}/",
                alternatives=["a new run from its weights", "a folder that save_state of this accelerator wrote"],
            )
        model.learner.load(state)
        model.learner.program.update_model(model.step)
        model.values.note()

    @contextlib.contextmanager
    def _optimizer_hidden(self) -> Iterator[None]:
        """Hide the optimizer from Accelerate in the context: only the program can write and read its state."""
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _model_of_program(self, call: str) -> ProgramModel:
        if self.program_model is None:
            raise CheckpointError(f"{call} needs a program, and there is none", alternatives="call prepare() first")
        return self.program_model


class ProgramModel:
    """The model of a loop.

    program, step: the generated program, and this rank's step of it. A call takes the whole global batch as the model
    does. In training mode it runs forward and backward, in evaluation mode forward alone. It returns the loss, the only
    output that the program computes; other outputs raise AttributeError.
    """

    def __init__(self, learner: RankLearner) -> None:
        self.learner, self.training = learner, True
        self.loop_optimizer: LoopOptimizer | None = None
        self.before_step: Callable[[], None] = _nothing
        self.values, self.pending = ModelValues(learner, learner.program.model), PendingLoss()

    @property
    def program(self) -> Any:
        return self.learner.program

    @property
    def step(self) -> Any:
        return self.learner.step

    @property
    def module(self) -> nn.Module:
        """The script's model. Only `whole` updates its values."""
        model: nn.Module = self.learner.program.model
        return model

    def __call__(self, *positional: Any, **keyword: Any) -> LossOutput | Tensor:
        batch = named(self.module, positional, keyword)
        self.values.give()
        if not self.training:
            return self._output(torch.tensor(self.learner.evaluate(batch)))
        self.before_step()
        self.pending.make_room(self.learner.optimizer)
        return self._output(self.pending.loss(self.learner.forward_backward(batch)))

    def _output(self, loss: Tensor) -> LossOutput | Tensor:
        """Return the loss as models of transformers do, or bare as models that compute their own loss do."""
        return LossOutput(loss) if hasattr(self.module, "save_pretrained") else loss

    def train(self, mode: bool = True) -> ProgramModel:
        """Set training mode, as a module does."""
        self.training = mode
        self.module.train(mode)  # on one process the two are the same module
        return self

    def eval(self) -> ProgramModel:
        """Set evaluation mode."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[ShardedParameter]:
        """Return stand-ins for the model's parameters, to count or to give to `accelerator.clip_grad_norm_`."""
        return (ShardedParameter(parameter) for parameter in self.module.parameters(recurse))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimizer does."""
        assert self.loop_optimizer is not None
        self.loop_optimizer.zero_grad(set_to_none)

    def whole(self) -> nn.Module:
        """Return the script's model with the trained values. Collective where training went on since the last call."""
        self.values.take()
        return self.module

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: a program's model is called, and accelerator.unwrap_model(model) has the rest")


def _nothing() -> None:
    """Do nothing: without a folder to write to, a run that gets SIGTERM ends as any process does."""


class ShardedParameter:
    """Shape and dtype of a model's parameter whose values and gradients are sharded over the ranks.

    Values and gradients raise RuntimeError, which says where they are. parameter: the model's.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter

    shape = property(lambda self: self.parameter.shape)
    dtype = property(lambda self: self.parameter.dtype)
    requires_grad = property(lambda self: self.parameter.requires_grad)

    def numel(self) -> int:
        return self.parameter.numel()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"{name} of a parameter: values and gradients are sharded over the ranks. "
            "accelerator.unwrap_model(model) has the trained values, accelerator.clip_grad_norm_ clips, "
            "model.step.gradients() gathers gradients"
        )


class LossOutput(Mapping[str, Tensor]):
    """The output of a call: `loss` by attribute, by name or as the first item, as in outputs of transformers."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: Any) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise KeyError(f"{key!r}: {_ONLY}")

    def __iter__(self) -> Any:
        return iter(["loss"])

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_ONLY}")


_ONLY = "a program computes the loss alone; accelerator.unwrap_model(model) has the values for anything else"
