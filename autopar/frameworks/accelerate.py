"""Accelerate's loop around an autopar program: `accelerator = parallelize(Accelerator(), "8 h100-sxm")`.

The rest of the script stays: `prepare`, `model(**batch).loss`, `accelerator.backward(loss)`, `clip_grad_norm_`,
`optimizer.step()`. A call of the model in training mode runs forward and backward of the whole global batch by the
program's step, since it does both at once; `backward` makes sure that these are the gradients that the script asks for.
Batches are those of one process: every rank's loader gives the whole batch, and so the losses are those of one process.
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
from autopar.frameworks.accelerators import ProgramAccelerator, stand_in
from autopar.frameworks.building import (
    SameOptimizer,
    build_learner,
    check_rows,
    config_of,
    first_step,
    moved_schedule,
    named,
    rows_of_steps,
)
from autopar.frameworks.loops import LoopOptimizer, ModelValues, PendingLoss
from autopar.training.config import TrainerConfig
from autopar.training.learners import RankLearner
from codegen.runtime.processes import Ending
from cost_models.mixed import AnyCluster

STATE_FOLDER = "autopar"
"""What `save_state` writes of the program beside Accelerate's files."""
LAST_FOLDER = "last"
"""Of the project, where the state is written when the run is told to end and checkpoints are not named by number."""


def parallelize(accelerator: Accelerator, cluster: AnyCluster | str, **options: Any) -> ProgramAccelerator:
    """The same accelerator, whose `prepare` plans a program for the model, its optimiser and the first loader.

    cluster: as in `autopar.compile`, or "detect". options: those that bear on the plan (`precision`, `constraints`,
    `plan`, `backend`, ...), as autopar.TrainerConfig has them, and `seed` of dropout.
    Raises ConstraintError for an accelerator with parallelism, precision or accumulation of its own.
    """
    if accelerator.gradient_accumulation_steps != 1:
        count = accelerator.gradient_accumulation_steps
        raise ConstraintError(
            "gradients are not accumulated over calls of the model",
            values=f"gradient_accumulation_steps={count}",
            alternatives=f"a loader with {count} times the rows: the plan splits them as memory asks",
        )
    seed = options.pop("seed", 0)
    config = config_of(cluster, seed, options)
    made = cast(LoopAccelerator, stand_in(accelerator, LoopAccelerator))
    made.config_of_program, made.program_model = config, None
    return made


class LoopAccelerator(ProgramAccelerator):
    """An accelerator whose `prepare` builds a program."""

    config_of_program: TrainerConfig
    program_model: ProgramModel | None

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Models become callables of the program; of loaders the first is the training one. Collective.

        Raises ConstraintError unless the first call has a model, its optimiser and its loader, AutoparError subclasses
        for what cannot be planned.
        """
        models = [each for each in objects if isinstance(each, nn.Module)]
        if self.program_model is None:
            objects = self._with_program(objects, models)
        elif models:
            raise ConstraintError(
                "an accelerator has one program", values=f"another model, {type(models[0]).__name__}",
                alternatives="another process, or autopar.compile and a loop of your own",
            )  # fmt: skip
        found = tuple(self._prepared(each) for each in objects)
        return found if len(found) > 1 else found[0]

    def _with_program(self, objects: tuple[Any, ...], models: list[nn.Module]) -> tuple[Any, ...]:
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        loaders = [each for each in objects if isinstance(each, torch.utils.data.DataLoader)]
        if len(models) != 1 or len(optimizers) != 1 or not loaders:
            raise ConstraintError(
                "the first prepare() has one model, its optimiser and its training loader, which make the program",
                values=", ".join(type(each).__name__ for each in objects),
                alternatives="accelerator.prepare(model, optimizer, loader, scheduler)",
            )
        model, optimizer = models[0], optimizers[0]
        model.to("cpu").train()
        factory = SameOptimizer(optimizer, model)
        prepared = self.prepare_data_loader(loaders[0])
        learner = build_learner(model, self.config_of_program, factory, first_step(prepared, 1))
        check_rows(learner, {rows for each in loaders for rows in rows_of_steps(each, 1)})
        self.program_model = ProgramModel(learner)
        if self.project_dir is not None:
            self.program_model.before_step = partial(self._end_if_told, Ending(learner.step.mesh.device))
        made = LoopOptimizer(learner, self.program_model.values, self.program_model.pending)
        self.program_model.loop_optimizer = made
        places = {id(model): self.program_model, id(optimizer): made, id(loaders[0]): prepared}
        for each in objects:
            if getattr(each, "optimizer", None) is optimizer:
                moved_schedule(each, optimizer, made)
        return tuple(places.get(id(each), each) for each in objects)

    def _prepared(self, each: Any) -> Any:
        """What the loop gets of one object: loaders of one process, schedules that step once per update."""
        if isinstance(each, LoopOptimizer):
            return self.prepare_optimizer(each)
        if isinstance(each, torch.optim.Optimizer):
            raise ConstraintError("a program has one optimiser", values=type(each).__name__)
        if isinstance(each, torch.utils.data.DataLoader):
            return self.prepare_data_loader(each)
        is_schedule = hasattr(each, "optimizer") and hasattr(each, "step")
        return self.prepare_scheduler(each) if is_schedule else each

    def backward(self, loss: Tensor, **options: Any) -> None:
        """As loss.backward(): the gradients are there, and this takes them for the update. Raises RuntimeError for a
        loss that is not the model's."""
        if self.gradient_accumulation_steps != 1:
            raise ConstraintError("gradients are not accumulated over calls of the model", alternatives="1")
        cast(Any, loss).backward(**options)

    def accumulate(self, *models: Any) -> Any:
        """The loop's own context: every step is an update."""
        return super().accumulate()

    def unwrap_model(self, model: Any, *given: Any, **named_options: Any) -> nn.Module:
        """The script's model with the values that were trained so far. Every rank calls this."""
        if not isinstance(model, ProgramModel):
            return cast(nn.Module, super().unwrap_model(model, *given, **named_options))
        return model.whole()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole state of the model. Every rank calls this."""
        return self.unwrap_model(model).state_dict()

    def save_model(self, model: Any, *given: Any, **named_options: Any) -> Any:
        """Write the whole model, once. Every rank calls this."""
        return super().save_model(self.unwrap_model(model), *given, **named_options)

    def save_state(self, *given: Any, **named_options: Any) -> Any:
        """Write schedules, random states and registered objects as Accelerate does, beside them a folder `autopar` with
        the program's state, which any plan goes on from. Every rank calls this. Raises CheckpointError."""
        learner = self._model_of_program("save_state").learner
        learner.check()
        with self._without_parts():
            folder = super().save_state(*given, **named_options)
        learner.save(Path(folder) / STATE_FOLDER, {})
        return folder

    def _end_if_told(self, ending: Ending) -> None:
        """Write the state and exit with code 143 where a rank was told to end (SIGTERM). Collective."""
        if ending.is_told():
            is_numbered = self.project_configuration.automatic_checkpoint_naming
            self.save_state(None if is_numbered else str(Path(self.project_dir) / LAST_FOLDER))
            raise SystemExit(Ending.EXIT_CODE)

    def load_state(self, *given: Any, **named_options: Any) -> None:
        """Go on from what `save_state` wrote. Every rank calls this. Raises CheckpointError for another's folder."""
        self._model_of_program("load_state")
        hook = self.register_load_state_pre_hook(self._load_program)  # which is told the folder that Accelerate chose
        try:
            with self._without_parts():
                super().load_state(*given, **named_options)
        finally:
            hook.remove()

    def _load_program(self, models: Any, folder: str) -> None:
        state, model = Path(folder) / STATE_FOLDER, self._model_of_program("load_state")
        if not state.is_dir():
            raise CheckpointError(
                "the folder has the state of another way to train",
                values=f"{folder} without {STATE_FOLDER}/",
                alternatives=["a new run from its weights", "a folder that save_state of this accelerator wrote"],
            )
        model.learner.load(state)
        model.learner.program.update_model(model.step)
        model.values.note()

    @contextlib.contextmanager
    def _without_parts(self) -> Iterator[None]:
        """What only the program can write and read is hidden from Accelerate: the optimiser."""
        held, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = held

    def _model_of_program(self, what: str) -> ProgramModel:
        if self.program_model is None:
            raise CheckpointError(f"there is no program whose state {what} could move", alternatives="prepare() first")
        return self.program_model


class ProgramModel:
    """What a loop calls as its model.

    program, step: the generated program, and this rank's step of it. A call takes the whole global batch as the model
    does; in training mode it runs forward and backward, in evaluation mode forward alone. It returns the loss, which is
    what has been computed: other outputs raise AttributeError.
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
        """The script's model, whose values are brought up to date by `whole` alone."""
        found: nn.Module = self.learner.program.model
        return found

    def __call__(self, *positional: Any, **keyword: Any) -> LossOutput | Tensor:
        batch = named(self.module, positional, keyword)
        self.values.give()
        if not self.training:
            return self._output(torch.tensor(self.learner.evaluate(batch)))
        self.before_step()
        self.pending.make_room(self.learner.optimizer)
        return self._output(self.pending.loss(self.learner.forward_backward(batch)))

    def _output(self, loss: Tensor) -> LossOutput | Tensor:
        """As transformers' models return it, or the bare loss, as others do that compute their own."""
        return LossOutput(loss) if hasattr(self.module, "save_pretrained") else loss

    def train(self, mode: bool = True) -> ProgramModel:
        """The model in training mode, as a module's own."""
        self.training = mode
        self.module.train(mode)  # on one process both are the same module
        return self

    def eval(self) -> ProgramModel:
        """The model in evaluation mode."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[HeldParameter]:
        """What stands for the model's parameters: to be counted, and given to `accelerator.clip_grad_norm_`."""
        return (HeldParameter(parameter) for parameter in self.module.parameters(recurse))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as the optimiser's own does."""
        assert self.loop_optimizer is not None
        self.loop_optimizer.zero_grad(set_to_none)

    def whole(self) -> nn.Module:
        """The script's model with the trained values. Collective where training went on since."""
        self.values.take()
        return self.module

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: a program's model is called, and accelerator.unwrap_model(model) has the rest")


def _nothing() -> None:
    """Where a run that is told to end (SIGTERM) has nowhere to write to, it ends as any process does."""


class HeldParameter:
    """One parameter of a model whose values and gradients ranks hold in parts: its shape and dtype, and no values.

    Values and gradients raise RuntimeError, which says where they are.
    """

    def __init__(self, own: Tensor) -> None:
        self.own = own

    shape = property(lambda self: self.own.shape)
    dtype = property(lambda self: self.own.dtype)
    requires_grad = property(lambda self: self.own.requires_grad)

    def numel(self) -> int:
        return self.own.numel()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"{name} of a parameter: ranks hold values and gradients in parts. accelerator.unwrap_model(model) has the "
            "trained values, accelerator.clip_grad_norm_ clips, model.step.gradients() gathers gradients"
        )


class LossOutput(Mapping[str, Tensor]):
    """What a call returns: `loss` by attribute, by name or as the first item, as outputs of transformers have it."""

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
