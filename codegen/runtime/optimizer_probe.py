"""Dependencies of an update, found by running the optimizer on small tensors.

A rank may update a part of a parameter by itself only where every element's update depends on that element's own
gradients and values (SGD, Adam, Lion). Some need the whole tensor (Adafactor, LAMB, Muon), which one rank then updates
for all (`whole_updates.py`), some all tensors at once (a clip by the global norm inside a step). Runs of a few steps
tell them apart:

    together   two tensors for every kind of parameter, in one optimizer
    apart      the first tensors in one optimizer, the second ones in another: equal unless tensors are coupled
    in parts   halves of the first tensors, flat, by rows and by columns, in two: equal if updates are elementwise
    resumed    together, by an optimizer that is made anew in between, with what checkpoints hold of the first

A kind is the settings of a group and a number of dims; the tensors have real shapes cut to LARGEST.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint_files import continue_settings, optimizer_record
from .optimizers import Factory, GlobalParameter, OptimizerError, needs_closure, settings_of, whole_optimizer

STEPS = 8
"""Enough for what starts late (Lookahead's fifth step, RAdam's sixth)."""
SCALES = (1.0, 100.0, 0.01, 1.0, 10.0, 0.1, 3.0, 1.0)
"""Factors on the gradients of each step, so that limits on norms are met."""
LARGEST = {1: 4224, 2: 136}
"""Elements of a dim, by the number of dims (else 12). Some optimizers do otherwise from 4,096 elements on, or from 128
in a dim."""
RESUMED = 4
"""Steps before the optimizer is made anew."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Allowed difference, as a share of the largest change. In fp64 sums in another order are off by 1e-13, updates by
another formula by 1e-3 and more. Optimizers that take no fp64 are tried in fp32, where those that change little are
taken for ones that need more."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The values that an optimizer's update must see besides an element's own.

    whole: names of the parameters whose update depends on the whole tensor. is_coupled: it depends on other parameters.
    optimizer: its name.
    """

    whole: frozenset[str] = frozenset()
    is_coupled: bool = False
    optimizer: str = ""

    @property
    def problem(self) -> str:
        """Return the part that is not elementwise, in words; "" if none."""
        if self.is_coupled:
            return f"the update of {self.optimizer} couples all parameters, so each rank must hold all of them whole"
        return f"the update of {self.optimizer} is not elementwise" * bool(self.whole)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that are taken to be updated alike. tensors: (name, shape) of those that are tried."""

    names: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Course:
    """A tensor's first values and its gradients of every step."""

    value: Tensor
    gradients: tuple[Tensor, ...]

    @classmethod
    def draw(cls, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> _Course:
        """A random value and gradients, neither symmetric nor alike in rows and columns."""

        def normal(dims: Sequence[int]) -> Tensor:
            return torch.randn(tuple(dims), generator=generator, dtype=dtype, device="cpu")

        uneven = torch.ones((), dtype=dtype, device="cpu")
        for dim, size in enumerate(shape):
            uneven = uneven * normal([size if d == dim else 1 for d in range(len(shape))]).exp()
        return cls(normal(shape) + 0.3, tuple((normal(shape) + 0.2) * uneven * scale for scale in SCALES[:STEPS]))

    def part(self, cut: Any) -> _Course:
        """The course of a part of the tensor, which `cut` takes from values and gradients."""
        return _Course(cut(self.value), tuple(cut(gradient) for gradient in self.gradients))


def needs_of(factory: Factory, parameters: Sequence[GlobalParameter]) -> Needs:
    """Tries the optimizer. Raises OptimizerError for one that cannot step, does not update, or draws random numbers."""
    try:
        return _tried(factory, parameters, torch.float64)
    except _StepError:
        return _tried(factory, parameters, torch.float32)


def forgotten(factory: Factory, parameters: Sequence[GlobalParameter]) -> str:
    """Return why a checkpoint would be without something that the optimizer's updates depend on; "" if it has all."""
    try:
        return _forgotten(factory, parameters, torch.float64)
    except _StepError:
        return _forgotten(factory, parameters, torch.float32)


def keeps_zeros(factory: Factory, parameters: Sequence[GlobalParameter], beside: frozenset[str] = frozenset()) -> bool:
    """Whether zeros whose gradients are zeros stay zeros, as padding must. False for an optimizer that cannot step.

    beside: names of parameters whose updates see no padding.
    """
    kinds = tuple(kind for kind in _kinds(factory, parameters) if not beside.issuperset(kind.names))
    for dtype in TOLERANCE if kinds else ():
        names, firsts, _ = _drawn(kinds, dtype)
        still = [first.part(torch.zeros_like) for first in firsts]
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), contextlib.suppress(_StepError):
            changes = _Trial(factory, parameters, names).run([[first] for first in still])
            return not any(change.any() for (change,) in changes)
    return not kinds


def _forgotten(factory: Factory, parameters: Sequence[GlobalParameter], dtype: torch.dtype) -> str:
    kinds = tuple(_kinds(factory, parameters))
    names, *drawn = _drawn(kinds, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        trial, pairs = _Trial(factory, parameters, names), list(map(list, zip(*drawn, strict=True)))
        torch.manual_seed(1)
        straight = trial.run(pairs)
        torch.manual_seed(1)
        if _equal(trial.run(pairs, resumed=RESUMED), straight):
            return ""
    around = f" (it is around {trial.inner})" * bool(trial.inner)
    return (
        f"{trial.optimizer} keeps something that its steps depend on neither in its state of parameters nor in its "
        f"groups{around}: resumed after {RESUMED} steps it goes on otherwise. Keep it there, as in "
        "self.state[parameter], or train without checkpoints"
    )


def _drawn(kinds: Sequence[_Kind], dtype: torch.dtype) -> tuple[list[str], list[_Course], list[_Course]]:
    """The names of the tensors that are tried, and two courses for each."""
    tensors = [kind_tensor for kind in kinds for kind_tensor in kind.tensors]
    generator = torch.Generator("cpu").manual_seed(0)
    firsts = [_Course.draw(shape, dtype, generator) for _, shape in tensors]
    seconds = [_Course.draw(shape, dtype, generator) for _, shape in tensors]
    return [name for name, _ in tensors], firsts, seconds


def _tried(factory: Factory, parameters: Sequence[GlobalParameter], dtype: torch.dtype) -> Needs:
    kinds = tuple(_kinds(factory, parameters))
    names, firsts, seconds = _drawn(kinds, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        trial = _Trial(factory, parameters, names)
        pairs = [[one, other] for one, other in zip(firsts, seconds, strict=True)]
        torch.manual_seed(1)
        together = trial.run(pairs)
        for name, changes in zip(names, together, strict=True):
            if (changes[0].numel() and not changes[0].any()) or not all(change.isfinite().all() for change in changes):
                if trial.inner:
                    raise OptimizerError(
                        f"{trial.optimizer} is an optimizer around another, which keeps parameters of its own",
                        f"{trial.inner}, after {STEPS} steps of which a tensor in the place of {name} is as it was",
                        "one that shares the inner one's groups (self.param_groups = inner.param_groups), or the inner "
                        "optimizer alone",
                    )
                raise OptimizerError(
                    f"{trial.optimizer} does not update what its param_groups hold",
                    f"after {STEPS} steps a tensor in the place of {name} is as it was, or not finite",
                    "an optimizer that reads its parameters from param_groups in every step",
                )
        if trial.is_random(pairs, together):
            raise OptimizerError(
                f"the update of {trial.optimizer} draws random numbers, which ranks would not draw alike",
                instead="an optimizer without",
            )
        if not _equal(together, _joined(trial.run([[c] for c in firsts]), trial.run([[c] for c in seconds]))):
            return Needs(frozenset(name for kind in kinds for name in kind.names), True, trial.optimizer)
        uneven = {*trial.uneven(firsts, [changes[0] for changes in together]), *trial.odd_state}
    whole = frozenset(name for kind in kinds for name in kind.names if any(n in uneven for n, _ in kind.tensors))
    return Needs(whole, False, trial.optimizer)


class _StepError(OptimizerError):
    """A step that raised an error."""


class _Trial:
    """Runs of one factory's optimizer, with tensors in the places of some parameters.

    inner: the optimizers that it is around, in words. odd_state: those of whose state something is neither one number
    nor as large as the tensor.
    """

    def __init__(self, factory: Factory, parameters: Sequence[GlobalParameter], names: list[str]) -> None:
        self.factory, self.parameters, self.names = factory, parameters, names
        self.optimizer = self.inner = ""
        self.odd_state: set[str] = set()

    def run(self, courses: Sequence[Sequence[_Course]], resumed: int | None = None) -> list[list[Tensor]]:
        """The change of every tensor; courses: those that take the place of each name's parameter. resumed: the step
        before which the optimizer is made anew."""
        tensors = [[nn.Parameter(course.value.clone()) for course in kind_courses] for kind_courses in courses]
        optimizer = self._made(tensors)
        initial = settings_of(optimizer)
        try:
            for step in range(STEPS):
                if step == resumed:
                    optimizer = self._again(optimizer, initial, tensors)
                for tensor, course in _both(tensors, courses):
                    tensor.grad = course.gradients[step].clone()
                optimizer.step()
        except Exception as error:
            if self._wants_closure(courses):
                raise needs_closure(f"{self.optimizer}.step fails without a closure") from error
            raise _StepError(
                f"{self.optimizer} cannot step on small dense tensors of a CPU with nothing but their gradients",
                f"{type(error).__name__}: {error}",
                "an optimizer that keeps what it knows of a parameter in self.state[parameter], makes it in its first "
                "step, and reads its settings from param_groups",
            ) from error
        self._look_at_state(optimizer, tensors)
        return [
            [tensor.detach() - course.value for tensor, course in zip(parts, kind_of_courses, strict=True)]
            for parts, kind_of_courses in zip(tensors, courses, strict=True)
        ]

    def _wants_closure(self, courses: Sequence[Sequence[_Course]]) -> bool:
        """Whether steps that fail without a closure succeed with one."""
        tensors = [[nn.Parameter(course.value.clone()) for course in kind_courses] for kind_courses in courses]
        optimizer: Any = self._made(tensors)

        def give_gradients(step: int) -> Tensor:
            for tensor, course in _both(tensors, courses):
                tensor.grad = course.gradients[step].clone()
            return torch.zeros(())

        try:
            for step in range(STEPS):
                give_gradients(step)
                optimizer.step(partial(give_gradients, step))
        except Exception:  # then it fails for another reason
            return False
        return True

    def _made(self, tensors: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        whole = whole_optimizer(self.factory, self.parameters)
        self.optimizer = type(whole.optimizer).__name__
        around = {k: v for k, v in vars(whole.optimizer).items() if isinstance(v, torch.optim.Optimizer)}
        self.inner = ", ".join(
            f"{name}, a {type(inner_optimizer).__name__}" for name, inner_optimizer in around.items()
        )
        optimizer = whole.replace(dict(zip(self.names, tensors, strict=True)))
        for group in optimizer.param_groups:
            # What a schedule starts from hides the update.
            if "lr" in group and float(group["lr"]) == 0.0:
                group["lr"] = group["lr"] + 0.01
        return optimizer

    def _again(
        self, before: torch.optim.Optimizer, initial: list[dict[str, Any]], tensors: list[list[nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """Another optimizer, with what a checkpoint holds of the one before."""
        fresh = self._made(tensors)
        states = {
            tensor: copy.deepcopy(before.state[tensor])
            for parts in tensors
            for tensor in parts
            if tensor in before.state
        }
        fresh.state.clear()
        for tensor, state in states.items():
            fresh.state[tensor] = state
        continue_settings(fresh, settings_of(fresh), {"optimizer": optimizer_record(before, initial)})
        return fresh

    def _look_at_state(self, optimizer: torch.optim.Optimizer, tensors: list[list[nn.Parameter]]) -> None:
        for name, parts in zip(self.names, tensors, strict=True):
            for tensor in parts:
                for key, value in optimizer.state.get(tensor, {}).items():
                    if isinstance(value, Tensor):
                        if value.numel() > 1 and value.shape != tensor.shape:
                            self.odd_state.add(name)
                    elif not isinstance(value, (int, float, type(None))):
                        raise OptimizerError(
                            f"{self.optimizer} keeps state that checkpoints cannot hold",
                            f"{key!r} of a parameter is a {type(value).__name__}",
                            "tensors and numbers",
                        )

    def is_random(self, courses: Sequence[Sequence[_Course]], changes: list[list[Tensor]]) -> bool:
        """Whether other random numbers give other changes."""
        torch.manual_seed(2)
        return not _equal(changes, self.run(courses))

    def uneven(self, courses: list[_Course], changes: list[Tensor]) -> Iterator[str]:
        """Names of tensors of which parts are updated otherwise than the whole."""
        cuts = [list(_cuts(tuple(course.value.shape))) for course in courses]
        for half in (0, 1):
            parts = [
                [course.part(cut[half]) for cut in parts_cut] for course, parts_cut in zip(courses, cuts, strict=True)
            ]
            results = self._run_parts(parts)
            for name, change, parts_cut, part in zip(self.names, changes, cuts, results, strict=True):
                if part is None or not _equal([[cut[half](change) for cut in parts_cut]], [part]):
                    yield name

    def _run_parts(self, parts: list[list[_Course]]) -> Sequence[list[Tensor] | None]:
        """The results of `run` on parts; None for tensors whose parts it does not take (Muon wants matrices)."""
        try:
            return self.run(parts)
        except OptimizerError:
            results: list[list[Tensor] | None] = []
            for index, part in enumerate(parts):
                try:
                    results.append(self.run([part if i == index else [] for i in range(len(parts))])[index])
                except OptimizerError:
                    results.append(None)
            return results


def _kinds(factory: Factory, parameters: Sequence[GlobalParameter]) -> Iterator[_Kind]:
    whole = whole_optimizer(factory, parameters)
    members: dict[Any, list[str]] = {}
    for group, names_of_group in zip(whole.optimizer.param_groups, whole.groups, strict=True):
        settings = tuple(sorted((key, _setting(key, value)) for key, value in group.items()))
        for name in names_of_group:
            members.setdefault((settings, whole.stand_ins[name].ndim), []).append(name)
    shapes = {p.name: p.shape for p in parameters}
    for names in members.values():
        small = {name: _small(shapes[name]) for name in names}
        # The one that is most like a square, and the smallest.
        square = max(names, key=lambda n: (min(small[n], default=0), sum(small[n])))
        least = min(names, key=lambda n: (sum(small[n]), n))
        yield _Kind(tuple(names), tuple((name, small[name]) for name in dict.fromkeys((square, least))))


def _setting(key: str, value: Any) -> str:
    """Return the settings that choose an algorithm: not the size of numbers, but whether they are 0."""
    if key in ("params", "param_names", "lr", "initial_lr"):
        return ""
    return f"float {value != 0}" if isinstance(value, float) else repr(value)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, LARGEST.get(len(shape), 12)) for size in shape)


def _cuts(shape: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
    """Ways to cut a tensor in two, as two functions each."""
    numel = torch.Size(shape).numel()
    if numel > 1:
        at = max(1, numel * 3 // 7)
        yield (lambda x: x.reshape(-1)[:at].clone()), (lambda x: x.reshape(-1)[at:].clone())
    for dim in range(len(shape)) if len(shape) > 1 else ():
        if shape[dim] > 1:
            yield _half(dim, 0, shape[dim] // 2), _half(dim, shape[dim] // 2, shape[dim] - shape[dim] // 2)


def _half(dim: int, start: int, length: int) -> Any:
    return lambda x: x.narrow(dim, start, length).clone()


def _both(tensors: list[list[nn.Parameter]], courses: Sequence[Sequence[_Course]]) -> Iterator[tuple[Any, _Course]]:
    for tensors_of_kind, courses_of_kind in zip(tensors, courses, strict=True):
        yield from zip(tensors_of_kind, courses_of_kind, strict=True)


def _joined(firsts: list[list[Tensor]], seconds: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[*one, *other] for one, other in zip(firsts, seconds, strict=True)]


def _equal(results: Iterable[Iterable[Tensor]], expected: Iterable[Iterable[Tensor]]) -> bool:
    return all(
        bool((a - b).abs().max() <= TOLERANCE[a.dtype] * b.abs().max())
        for result, other in zip(results, expected, strict=True)
        for a, b in zip(result, other, strict=True)
        if a.numel()
    )
