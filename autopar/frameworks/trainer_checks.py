"""Refuse settings of transformers' Trainer, before the first step, that a program cannot follow as one process does."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback

from autopar.errors import AutoparError, ConstraintError

PRECISION = "precision= of parallelize: layers compute in it with fp32 masters, where autocast rounds call by call"


@dataclass(frozen=True, slots=True)
class RefusedArgument:
    """One argument of TrainingArguments. is_set: whether a value is refused."""

    name: str
    reason: str
    instead: str | Sequence[str]
    is_set: Callable[[Any], bool] = bool


REFUSED = (
    RefusedArgument("bf16", "autocast rounds other calls than a program in bf16 does", PRECISION),
    RefusedArgument("fp16", "autocast rounds other calls than a program in fp16 does", PRECISION),
    RefusedArgument("bf16_full_eval", "a program evaluates in the precision that it trains in", "bf16_full_eval=False"),
    RefusedArgument("fp16_full_eval", "a program evaluates in the precision that it trains in", "fp16_full_eval=False"),
    RefusedArgument("torch_compile", "torch.compile would wrap the model", 'backend="inductor" of parallelize'),
    RefusedArgument("activation_checkpointing", "the plan chooses what is recomputed", "constraints= with recompute"),
    RefusedArgument("gradient_checkpointing", "the plan chooses what is recomputed", "constraints= with recompute"),
    RefusedArgument("use_liger_kernel", "it changes the model while it trains", 'kernels="on" of parallelize'),
    RefusedArgument(
        "neftune_noise_alpha", "its hook draws noise per process", "neftune_noise_alpha=None", lambda v: v is not None
    ),
    RefusedArgument("label_smoothing_factor", "the loss is the model's own", "a model that smooths in its forward"),
    RefusedArgument("auto_find_batch_size", "the plan splits a batch as memory asks", "auto_find_batch_size=False"),
    RefusedArgument("fsdp", "the program shards the model itself", "no fsdp"),
    RefusedArgument("deepspeed", "the program shards the model itself", "no deepspeed"),
    RefusedArgument("parallelism_config", "the program has its own parallelism", "constraints= of parallelize"),
    RefusedArgument("debug", "its hooks would see no forward of the model", 'debug=""'),
    RefusedArgument(
        "n_gpu", "one process has several GPUs", "torchrun, with one process per GPU", lambda value: value > 1
    ),
    RefusedArgument(
        "train_sampling_strategy",
        "it gives each process other batches",
        ["random", "sequential", "group_by_length"],
        lambda value: value == "batch_rebalance",
    ),
    RefusedArgument(
        "optim",
        "the optimizer updates inside of the backward",
        "adamw_torch",
        lambda value: any(word in str(getattr(value, "value", value)) for word in ("lomo", "layerwise")),
    ),
)

SILENT = (
    "compute_loss",
    "training_step",
    "_prepare_inputs",
    "_prepare_input",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_wrap_model",
    "_get_num_items_in_batch",
    "get_batch_samples",
    "_run_epoch",
    "_inner_training_loop",
    "_prepare_for_training",
    "prediction_step",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_finalize_training",
    "create_accelerator_and_postprocess",
)
"""Methods that the program's step replaces, or that decide what it would compute. Overrides of them are refused."""

USED = (*SILENT, "_load_best_model", "floating_point_ops", "create_optimizer", "evaluation_loop", "save_model")
"""Methods of transformers' Trainer that autopar overrides or relies on."""

PER_TOKEN = ("ForCausalLM", "ForMaskedLM")
"""Losses that are the mean over the targets, also over several joined batches."""


def check_trainer(trainer: Trainer) -> None:
    """Raise ConstraintError for a Trainer whose losses would differ from those of one process."""
    if missing := [name for name in USED if not hasattr(Trainer, name)]:
        raise AutoparError(
            "this version of transformers has another Trainer",
            values=f"without {missing[0]}",
            alternatives="pip install transformers==5.23",
        )
    for argument in REFUSED:
        value = getattr(trainer.args, argument.name, None)
        if argument.is_set(value):
            raise ConstraintError(
                f"{argument.name}: {argument.reason}",
                values=f"{argument.name}={value!r}",
                alternatives=argument.instead,
            )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if trainer.args.world_size != launched:
        raise ConstraintError(
            "TrainingArguments do not know of the launched processes: each would write all files",
            values=f"world_size={trainer.args.world_size} of {launched} processes",
            alternatives="use_cpu=True, where ranks have no GPUs",
        )
    _check_methods(trainer)
    _check_given(trainer)
    _check_joined(trainer)


def _check_methods(trainer: Trainer) -> None:
    """Raise ConstraintError for methods that a subclass, or an assignment to the object, overrides."""
    for name in SILENT:
        owner = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
        if name in vars(trainer) or not owner.__module__.startswith("transformers."):
            raise ConstraintError(
                f"{name} is overridden, and the program's step would not call it",
                values=f"{owner.__name__}.{name}",
                alternatives=[
                    "a loss in the model's forward",
                    "autopar.compile and a loop of your own, where you call the step",
                ],
            )


def _check_given(trainer: Trainer) -> None:
    """Raise ConstraintError for other settings of the Trainer than its arguments."""
    if trainer.compute_loss_func is not None:
        raise ConstraintError(
            "compute_loss_func: the loss is the model's own",
            values=getattr(trainer.compute_loss_func, "__name__", "a function"),
            alternatives="a model that computes it in forward",
        )
    inner = _base_model(trainer)
    if trainer.model_accepts_loss_kwargs and not isinstance(inner, PreTrainedModel):
        raise ConstraintError(
            "the Trainer gives the model num_items_in_batch, whose effect on the loss is unknown",
            values=f"forward of {type(inner).__name__} takes **kwargs",
            alternatives="model.accepts_loss_kwargs = False before the Trainer is made",
        )
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise ConstraintError(
                "a callback that looks at gradients before the update would find none in the model",
                values=f"{type(callback).__name__}.on_pre_optimizer_step",
                alternatives="on_optimizer_step, and trainer.learner.step.gradients() for whole gradients",
            )


def _check_joined(trainer: Trainer) -> None:
    """Raise ConstraintError where accumulated batches differ from one batch of all their rows."""
    steps = trainer.args.gradient_accumulation_steps
    if steps == 1:
        return
    model = _base_model(trainer)
    config, kind = getattr(model, "config", None), getattr(model, "loss_type", None)
    is_mean = trainer.model_accepts_loss_kwargs and kind in PER_TOKEN and _hands_on_count(model)
    if not is_mean or getattr(config, "output_router_logits", False) or trainer.loss_is_scaled_for_ga is False:
        raise ConstraintError(
            "the Trainer's loss of accumulated batches is not that of all their rows together",
            values=f"gradient_accumulation_steps={steps} with the loss {kind or 'of the model'}",
            alternatives=f"gradient_accumulation_steps=1 and {steps} times the batch size, which the plan splits as "
            "memory requires",
        )


def _base_model(trainer: Trainer) -> Any:
    """Return the model without PEFT's wrapper."""
    model: Any = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _hands_on_count(model: Any) -> bool:
    """Return whether forward gives transformers' loss the number of targets; models with their own loss lose it."""
    try:
        text = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
    _, is_there, call = text.partition("self.loss_function(")
    return bool(is_there) and "**" in call.partition(")")[0]
