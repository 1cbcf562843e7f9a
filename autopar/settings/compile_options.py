"""What is asked for beside a model and a cluster: one value behind `compile`, `verify`, `Trainer` and command line.

Each option is declared, explained and checked here and nowhere else. The public functions take the fields by keyword
(`with_options`), the rest of autopar hands on the value.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import nn

from autopar.costs.updates import OptimizerFactory
from autopar.errors import ConstraintError, PlanError
from autopar.files.text_files import shown
from autopar.ir.compression import Compression
from autopar.plan import Plan
from autopar.settings.arguments import check_batch, check_numbers, whole, word
from autopar.settings.constraints import Constraints
from codegen.runtime.compiled_layers import BACKENDS
from codegen.runtime.precision import PRECISIONS, compute_dtype
from cost_models.mixed import AnyCluster

KERNEL_CHOICES = ("auto", "on", "off")

P = ParamSpec("P")
Found = TypeVar("Found")
Options = TypeVar("Options", bound="PlanOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What bears on a plan and can be written in a file. A wrong type or word raises ConstraintError or PlanError."""

    global_batch_size: int | None = None
    """The rows of one optimiser step over all ranks; None takes those of the example (for a Trainer, of the first
    batch)."""
    precision: str = "fp32"
    """The numbers that layers compute with are "fp32", or "bf16" or "fp16" (with fp32 masters and reductions). In fp16
    the loss is scaled, as codegen/runtime/loss_scale.py says."""
    constraints: Mapping[str, Any] | None = None
    """What is pinned, as `autopar.settings.constraints` says."""
    kernels: str = "auto"
    """The choice "on" puts fused Triton kernels in place of runs of calls (codegen/fusion), "off" never does, "auto"
    does on GPUs. Plans are chosen and priced accordingly. On a CPU the kernels run their torch reference, which only
    for the linear layer with its loss is another computation, and is priced so."""
    compression: Mapping[str, str] | None = None
    """ZeRO's collectives of parameters are rounded on the wire to what this says: {"gather": "int8" or "fp8",
    "reduce": "int8"}, or one of them. This is lossy, with the bounds of codegen/runtime/compressed.py; plans are chosen
    and priced accordingly. `compile` warns where nothing is left to compress. None takes what a given plan says."""
    fp8: bool | None = None
    """Linear layers of repeated layers multiply in e4m3 with a scale per row, but for their weights' gradients
    (codegen/kernels/fp8.py has the bounds). This is lossy, for GPUs of compute capability 8.9 or more in bf16; on a CPU
    the same numbers are computed in fp32, to verify, and take longer. Plans are priced accordingly. None takes what a
    given plan says."""
    backend: str = "eager"
    """The layers run by "eager" torch; with "inductor" what they compute between collectives is compiled by
    torch.compile, once per layer class, in the first step; with "async-tp" products run beside the transfer of what
    they read and make on tp, where the GPUs of a node share memory. Neither is priced, but that inductor's programs run
    no sums of gradients beside other gradients."""
    plan: Plan | str | Path | None = None
    """A plan, or its file, is used instead of searching; it is validated and priced again."""

    def __post_init__(self) -> None:
        check_numbers({"global_batch_size": self.global_batch_size})
        word("kernels", self.kernels, KERNEL_CHOICES)
        word("precision", self.precision, PRECISIONS)
        word("backend", self.backend, BACKENDS)
        Constraints.parse(self.constraints)
        Compression.parse(self.compression)
        if not isinstance(self.fp8, bool) and self.fp8 is not None:
            values, legal = shown(self.fp8), "True, False or None"
            raise ConstraintError("fp8 is neither True nor False", values=values, alternatives=legal)
        if self.plan is not None and not isinstance(self.plan, (Plan, str, Path)):
            raise PlanError("plan is neither a Plan nor the name of its file", values=shown(self.plan))

    @property
    def common(self) -> dict[str, Any]:
        """The fields of PlanOptions by name, also of a value that has more."""
        return {field.name: getattr(self, field.name) for field in fields(PlanOptions)}

    @property
    def given_plan(self) -> Plan | None:
        """The plan that is given, read where it is a file. Raises PlanError."""
        return self.plan if isinstance(self.plan, Plan) or self.plan is None else Plan.from_file(self.plan)

    @property
    def dtype(self) -> torch.dtype | None:
        """What parameters are cast to before tracing; None leaves them as they are."""
        return compute_dtype(self.precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(PlanOptions):
    """All that `compile` takes beside the model and the cluster. Raises TraceError too, for what is no batch."""

    example_inputs: tuple[Any, ...] | Mapping[str, Any]
    """One batch is given as the model takes it (tuple or dict), with the targets that loss_fn takes after the model's
    output. Shapes and dtypes matter, values do not."""
    loss_fn: Callable[..., torch.Tensor] | None = None
    """The loss is `loss_fn(output, *targets) -> scalar`, for models that do not return their loss."""
    optimizer: OptimizerFactory | None = None
    """The factory is `params -> torch.optim.Optimizer`, or `named_parameters -> torch.optim.Optimizer` (by the
    argument's name, or an attribute `takes_names`), called with tensors that have the names, shapes and order of the
    model's parameters; None is fused AdamW, in `verify` SGD with momentum. What the optimiser leaves out is not
    trained. It is tried on small tensors: where an update is not elementwise only plans that hold parameters whole are
    considered."""

    def __post_init__(self) -> None:
        check_batch(self.example_inputs)
        for name in ("loss_fn", "optimizer"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConstraintError(f"{name} is a function", values=shown(value), alternatives="a function, or None")
        PlanOptions.__post_init__(self)  # slots make a new class, which super() without arguments does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(CompileOptions):
    """All that `verify` takes beside the model and the cluster."""

    steps: int = 3
    """So many optimiser steps are compared, each with the batch's rows rotated by one more."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm; None does not clip."""
    seed: int = 0
    """The dropout masks follow from this number."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        check_verify(self.steps, self.max_grad_norm, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(CompileOptions):
    """All that `trial` takes beside the model and the cluster."""

    plans: int = 3
    """So many plans are run at most, the best of each of the best layouts."""
    steps: int = 8
    """So many steps are timed in every round, after two that are not."""
    rounds: int = 3
    """The plans take turns so often; each starts its processes anew."""
    profile: str | Path | None = None
    """The cluster's TOML file gets the measurements, where autopar wrote it; any other leaves them in the user's cache.
    None is the file that the cluster's text names, if it does."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        for name in ("plans", "steps", "rounds"):
            whole(name, getattr(self, name), 1)


def check_verify(steps: Any, max_grad_norm: Any, seed: Any) -> None:
    """Raises ConstraintError for what `verify` cannot run with."""
    whole("steps", steps, 1)
    check_numbers({"seed": seed, "max_grad_norm": max_grad_norm})


def with_options(
    options: Callable[P, Options],
) -> Callable[
    [Callable[[nn.Module, AnyCluster | str, Options], Found]],
    Callable[Concatenate[nn.Module, AnyCluster | str, P], Found],
]:
    """Turns `f(model, cluster_spec, options)` into a function that takes the fields of the options by keyword.

    That function raises TypeError, with the options that there are, for a call that does not fit its signature.
    """

    def decorate(function: Callable[[nn.Module, AnyCluster | str, Options], Found]) -> Any:
        own, keywords = inspect.signature(function), inspect.signature(options).parameters
        signature = own.replace(parameters=[*list(own.parameters.values())[:2], *keywords.values()])

        @functools.wraps(function)
        def called(*given: Any, **named: Any) -> Found:
            try:
                model, cluster_spec = signature.bind(*given, **named).args
            except TypeError as error:
                legal = f"after the model and the cluster, options are given by keyword: {', '.join(keywords)}"
                raise TypeError(f"autopar.{function.__name__}: {error}; {legal}") from None
            return function(
                model, cluster_spec, cast(Any, options)(**{k: v for k, v in named.items() if k in keywords})
            )

        called.__signature__ = signature  # type: ignore[attr-defined]
        texts = (f"{name}\n{textwrap.indent(text, '    ')}" for name, text in _explained(cast(Any, options)).items())
        called.__doc__ = "\n\n".join((inspect.getdoc(function) or "", "Options, by keyword:", *texts))
        return called

    return decorate


def _explained(options: type[PlanOptions]) -> dict[str, str]:
    """The fields in their order -> what is written below each of them; {} where there is no source to read."""
    found: dict[str, str] = {}
    for owner in reversed(options.__mro__[:-1]):
        try:
            (body,) = ast.parse(inspect.getsource(owner)).body
        except OSError:
            return {}
        for declared, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
            if isinstance(declared, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(declared.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return {field.name: found[field.name] for field in fields(options)}
