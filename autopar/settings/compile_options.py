"""The options beside the model and the cluster: one value behind `compile`, `verify`, `Trainer` and the command line.

Each option is declared, explained and checked here only. The public functions take the fields by keyword
(`with_options`); the rest of autopar passes the value on.
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

from autopar.costs.updates import OptimizerFactory, adamw
from autopar.errors import ConstraintError, PlanError
from autopar.files.text_files import shown
from autopar.ir.compression import Compression
from autopar.plan import Plan
from autopar.settings.arguments import check_batch, check_numbers, whole, word
from autopar.settings.constraints import Constraints
from codegen.runtime.compiled_layers import BACKENDS
from codegen.runtime.precision import PRECISIONS, compute_dtype
from cost_models.mixed_cluster import AnyCluster

KERNEL_CHOICES = ("auto", "on", "off")

P = ParamSpec("P")
Result = TypeVar("Result")
Options = TypeVar("Options", bound="PlanOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that affect a plan and can stand in a file. A wrong type or word raises ConstraintError or
    PlanError."""

    global_batch_size: int | None = None
    """Rows of one optimizer step over all ranks. None takes the rows of the example, or for a Trainer of the first
    batch."""
    precision: str = "fp32"
    """The dtype of the layers: "fp32", or "bf16" or "fp16" (with fp32 master weights and reductions). fp16 scales the
    loss (codegen/runtime/loss_scale.py)."""
    constraints: Mapping[str, Any] | None = None
    """Pinned and forbidden decisions (`autopar.settings.constraints`)."""
    kernels: str = "auto"
    """"on" replaces runs of calls by fused Triton kernels (codegen/fusion), "off" does not, "auto" does on GPUs. The
    choice and the price of plans account for it. On a CPU the kernels run their torch reference. Only that of the
    linear layer with its loss computes differently, and its price accounts for it."""
    compression: Mapping[str, str] | None = None
    """Compression of ZeRO's collectives (lossy): {"gather": "int8" or "fp8", "reduce": "int8"}, or one of them.
    codegen/runtime/compressed.py has the error bounds. The choice and the price of plans account for it. `compile`
    warns if no collective is left to compress. None takes the compression of a given plan."""
    fp8: bool | None = None
    """Compute the linear layers of repeated layers in e4m3 with a scale per row, except their weight gradients (lossy;
    codegen/kernels/fp8.py has the error bounds). It needs GPUs of compute capability 8.9 or more in bf16. A CPU
    computes the same numbers in fp32, for verification, and takes longer. Prices account for it. None takes the
    setting of a given plan."""
    backend: str = "eager"
    """"eager" runs layers with torch. "inductor" compiles the computation between collectives with torch.compile, once
    per layer class, in the first step. "async-tp" overlaps matrix products with the tp transfers of their operands and
    results, where the GPUs of a node share memory. Prices do not depend on it, except that inductor's programs do not
    overlap gradient reductions with other gradients."""
    plan: Plan | str | Path | None = None
    """A plan or its file, to use instead of searching. It is validated and priced again."""

    def __post_init__(self) -> None:
        check_numbers({"global_batch_size": self.global_batch_size})
        word("kernels", self.kernels, KERNEL_CHOICES)
        word("precision", self.precision, PRECISIONS)
        word("backend", self.backend, BACKENDS)
        Constraints.parse(self.constraints)
        Compression.parse(self.compression)
        if not isinstance(self.fp8, bool) and self.fp8 is not None:
            values, legal = shown(self.fp8), "True, False or None"
            raise ConstraintError("fp8 must be True, False or None", values=values, alternatives=legal)
        if self.plan is not None and not isinstance(self.plan, (Plan, str, Path)):
            raise PlanError(
                "plan must be a Plan or the name of its file", values=shown(self.plan), alternatives='"plan.yaml"'
            )

    @property
    def common(self) -> dict[str, Any]:
        """The fields of PlanOptions by name, without those of subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(PlanOptions)}

    @property
    def given_plan(self) -> Plan | None:
        """The given plan, read if it is a file. Raises PlanError."""
        return self.plan if isinstance(self.plan, Plan) or self.plan is None else Plan.from_file(self.plan)

    @property
    def limits(self) -> Constraints:
        """The constraints as a value."""
        return Constraints.parse(self.constraints)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of parameters while tracing; None leaves them unchanged."""
        return compute_dtype(self.precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions(PlanOptions):
    """The options of `compile`. An invalid batch raises TraceError."""

    example_inputs: tuple[Any, ...] | Mapping[str, Any]
    """One batch as the model takes it (tuple or dict), followed by the targets that loss_fn takes after the model's
    output. Shapes and dtypes matter, values do not."""
    loss_fn: Callable[..., torch.Tensor] | None = None
    """The loss, `loss_fn(output, *targets) -> scalar`, for models that do not return their loss."""
    optimizer: OptimizerFactory | None = None
    """The factory `params -> torch.optim.Optimizer`, or `named_parameters -> torch.optim.Optimizer` (by the argument's
    name, or an attribute `takes_names`). Its argument has the names, shapes and order of the model's parameters. None
    is fused AdamW, in `verify` SGD with momentum. Parameters that the optimizer omits are not trained. autopar tries
    the optimizer on small tensors. If an update is not elementwise, only plans with unsharded parameters are
    considered."""

    def __post_init__(self) -> None:
        check_batch(self.example_inputs)
        for name in ("loss_fn", "optimizer"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConstraintError(f"{name} is a function", values=shown(value), alternatives="a function, or None")
        PlanOptions.__post_init__(self)  # slots create a new class, which breaks super() without arguments

    @property
    def factory(self) -> OptimizerFactory:
        """The optimizer, or the default one."""
        return self.optimizer or adamw


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(CompileOptions):
    """The options of `verify`."""

    steps: int = 3
    """Optimizer steps to compare. Each step rotates the batch's rows by one more."""
    max_grad_norm: float | None = None
    """Clip gradients to this norm; None does not clip."""
    seed: int = 0
    """The seed of the dropout masks."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        check_verify(self.steps, self.max_grad_norm, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(CompileOptions):
    """The options of `trial`."""

    plans: int = 3
    """The most plans to run: the best plan of each of the best meshes."""
    steps: int = 8
    """Timed steps per round, after two warm-up steps."""
    rounds: int = 3
    """Rounds. Every plan runs once per round, in new processes."""
    profile: str | Path | None = None
    """The cluster file that gets the measurements, if autopar wrote it; else they go to the user's cache. None is the
    file that the cluster's text names, if it names one."""

    def __post_init__(self) -> None:
        CompileOptions.__post_init__(self)
        for name in ("plans", "steps", "rounds"):
            whole(name, getattr(self, name), 1)


def check_verify(steps: Any, max_grad_norm: Any, seed: Any) -> None:
    """Raise ConstraintError for options that `verify` cannot run with."""
    whole("steps", steps, 1)
    check_numbers({"seed": seed, "max_grad_norm": max_grad_norm})


def with_options(
    options: Callable[P, Options],
) -> Callable[
    [Callable[[nn.Module, AnyCluster | str, Options], Result]],
    Callable[Concatenate[nn.Module, AnyCluster | str, P], Result],
]:
    """Turn `f(model, cluster_spec, options)` into a function that takes the fields of the options by keyword.

    A call that does not fit its signature raises TypeError with the list of options.
    """

    def decorate(function: Callable[[nn.Module, AnyCluster | str, Options], Result]) -> Any:
        plain, keywords = inspect.signature(function), inspect.signature(options).parameters
        signature = plain.replace(parameters=[*list(plain.parameters.values())[:2], *keywords.values()])

        @functools.wraps(function)
        def called(*arguments: Any, **options_by_name: Any) -> Result:
            try:
                model, cluster_spec = signature.bind(*arguments, **options_by_name).args
            except TypeError as error:
                legal = f"pass options by keyword after the model and the cluster: {', '.join(keywords)}"
                raise TypeError(f"autopar.{function.__name__}: {error}; {legal}") from None
            return function(
                model, cluster_spec, cast(Any, options)(**{k: v for k, v in options_by_name.items() if k in keywords})
            )

        called.__signature__ = signature  # type: ignore[attr-defined]
        texts = (f"{name}\n{textwrap.indent(text, '    ')}" for name, text in _explained(cast(Any, options)).items())
        called.__doc__ = "\n\n".join((inspect.getdoc(function) or "", "Options, by keyword:", *texts))
        return called

    return decorate


def _explained(options: type[PlanOptions]) -> dict[str, str]:
    """Map each field, in order, to the docstring below it; {} if the source cannot be read."""
    explanations: dict[str, str] = {}
    for owner in reversed(options.__mro__[:-1]):
        try:
            (body,) = ast.parse(inspect.getsource(owner)).body
        except OSError:
            return {}
        for declared, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
            if isinstance(declared, ast.AnnAssign) and isinstance(below, ast.Expr):
                explanations[ast.unparse(declared.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return {field.name: explanations[field.name] for field in fields(options)}
