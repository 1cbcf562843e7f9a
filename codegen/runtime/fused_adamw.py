"""torch's AdamW, whose update of all shards of a rank is one launch of `kernels/adamw.py` per set of dtypes.

It also multiplies by the clip factor and writes the copies that the model computes with (`Bucket.own_copy`), which
would take two passes more. Bytes per element: 28, and those of the copy, instead of 28, 8 for clipping, and 4 and those
of the copy for copying.

State is torch's: `exp_avg`, `exp_avg_sq` and `step` of each parameter, so state dicts and checkpoints of the one load
into the other. The moments of a bucket are one line each, laid out as its master (flat.py), and what the state holds
are views of them: consecutive parameters are one row of the kernel's table. Values that are put into the state from
outside are copied into the lines before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..kernels.adamw import AdamWTable, adamw_, adamw_table
from .flat import Bucket

_Key = tuple[int, float, torch.dtype, torch.dtype | None]
"""(number of the parameter group, steps made, dtype of the masters, dtype of the copies): what one launch has in
common."""


_STATE = ("step", "exp_avg", "exp_avg_sq")


class FusedAdamW(torch.optim.AdamW):
    """Arguments as torch's. Until it is attached, its steps are those of torch's fused AdamW.

    clip_factor: what the steps to come multiply gradients by (0-dim, on their device); None: 1. Gradients are read from
    the buckets, and `amsgrad` and `maximize` of a group are not honoured: a step raises ValueError.
    """

    is_elementwise = True

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.clip_factor: Tensor | None = None
        self._shards: tuple[_Shard, ...] = ()
        self._sets: tuple[_Set, ...] = ()
        self._weight_decays: tuple[float, ...] = ()
        self._rates: list[Tensor] = []
        self._num_tables = 0

    def attach(self, buckets: Sequence[Bucket]) -> None:
        """Update these buckets' masters from their gradients, all of which are on the device, and their copies."""
        self._shards = tuple(_Shard(bucket) for bucket in buckets if bucket.key.requires_grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. closure: as torch's."""
        if not self._shards:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bring_up_to_date()
        for parameter_set in self._sets:
            group = self.param_groups[parameter_set.group]
            first = parameter_set.steps_T[0]
            rate = self._rates[parameter_set.group] if self._rates else group["lr"]
            adamw_(parameter_set.table, first, rate, group["betas"], group["eps"], self.clip_factor)
            parameter_set.steps_T[1:].copy_(first)
        return loss

    def _bring_up_to_date(self) -> None:
        if not self._is_current():
            self._sets = tuple(self._make_sets())
            self._num_tables += 1

    # For CUDA graphs --------------------------------------------------------------------------------------------------

    def prepare(self, device: torch.device) -> None:
        """Write the learning rates to the device, from where steps read them from now on."""
        self._bring_up_to_date()
        if len(self._rates) != len(self.param_groups):
            self._rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in self.param_groups]
            self._num_tables += 1
        for tensor, group in zip(self._rates, self.param_groups, strict=True):
            tensor.copy_(group["lr"]) if isinstance(group["lr"], Tensor) else tensor.fill_(group["lr"])

    def unprepare(self) -> None:
        """Let steps read the learning rates of the groups again."""
        self._rates = []

    def constants(self) -> tuple[Any, ...]:
        """Return what a graph of a step holds for good: the memory that it updates, and the options but the rates."""
        return self._num_tables, *(
            (tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in self.param_groups
        )

    @property
    def has_hooks(self) -> bool:
        """Whether a script wants to be called in every step, which a graph would not do."""
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        # Schedulers of the learning rate wrap the method, to see whether it was called once.
        own_step = self.__dict__.get("step")
        return any(hooks) or not (own_step is None or hasattr(own_step, "_wrapped_by_lr_sched"))

    def _is_current(self) -> bool:
        """Whether the state is what the last step left, and the groups are as they were."""
        state, nothing = self.state, dict[str, Any]()
        for one in self._sets:
            for parameter, (count, first, second) in one.states:
                state_of_parameter = state.get(parameter, nothing)
                if state_of_parameter.get("exp_avg") is not first or state_of_parameter.get("exp_avg_sq") is not second:
                    return False
                if state_of_parameter.get("step") is not count:
                    return False
        return bool(self._sets) and self._weight_decays == self._decays()

    def _decays(self) -> tuple[float, ...]:
        return tuple(group["weight_decay"] for group in self.param_groups)

    def _make_sets(self) -> Iterator[_Set]:
        self._weight_decays = self._decays()
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"]:
                raise ValueError("the fused AdamW has neither amsgrad nor maximize; choose torch.optim.AdamW for them")
        groups = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        rows: dict[_Key, list[_Row]] = {}
        for shard in self._shards:
            shard.take_over(self.state)
            for key, row in shard.rows(groups, self.state):
                rows.setdefault(key, []).append(row)
        for (number, count, *_), rows_of_key in rows.items():
            yield _Set.of(number, count, rows_of_key, self._weight_decays[number], self.state)


@dataclass(frozen=True, slots=True)
class _Row:
    """Elements lo to hi of a shard's lines, and the parameters that they are."""

    shard: _Shard
    lo: int
    hi: int
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """The parameters that one launch updates: rows of one key.

    steps_T: one for each of T parameters, all equal. states: the tensors in the state of each parameter.
    """

    group: int
    table: AdamWTable
    steps_T: Tensor
    states: tuple[tuple[nn.Parameter, tuple[Tensor, Tensor, Tensor]], ...]

    @classmethod
    def of(cls, group: int, count: float, rows: list[_Row], weight_decay: float, state: dict[Any, Any]) -> _Set:
        """The table of some rows; their parameters' state becomes views of the shards' lines."""
        masters, gradients, exp_avgs, exp_avg_sqs, copies = columns = tuple(list[Tensor]() for _ in range(5))
        states = []
        parameters = [parameter for row in rows for parameter in row.parameters]
        steps_T = torch.full((len(parameters),), count, dtype=torch.float32, device=parameters[0].device)
        left = iter(steps_T.unbind())
        for row in rows:
            for column, line in zip(columns, row.shard.lines, strict=True):
                column += [] if line is None else [line[row.lo : row.hi]]
            for parameter in row.parameters:
                values = (next(left), *row.shard.moments(parameter))
                state[parameter] = dict(zip(_STATE, values, strict=True))
                states.append((parameter, values))
        table = adamw_table(masters, gradients, exp_avgs, exp_avg_sqs, copies or None, weight_decay)
        return cls(group, table, steps_T, tuple(states))


class _Shard:
    """A bucket's range on this rank, with lines for the moments.

    lines: masters, gradients, both moments and, where there is one, the copy; all of `shard_numel` elements.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._moments = (torch.zeros_like(bucket.master), torch.zeros_like(bucket.master))
        self.lines: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
        self.lines = (bucket.master.detach(), bucket.gradient, *self._moments, bucket.own_copy)
        self._places = {
            entry.stored: (entry.start + entry.lo - bucket.offset, entry.hi - entry.lo)
            for entry in bucket.entries
            if entry.stored is not None
        }

    def moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """exp_avg and exp_avg_sq of a parameter, in its shape."""
        lo, numel = self._places[parameter]
        first, second = (line.narrow(0, lo, numel).view_as(parameter) for line in self._moments)
        return first, second

    def take_over(self, state: dict[Any, Any]) -> None:
        """Set the lines to the moments that the state holds, zeros where it holds none."""
        for parameter in self._places:
            state_of_parameter = state.get(parameter, {})
            for name, line in zip(_STATE[1:], self.moments(parameter), strict=True):
                if name not in state_of_parameter:
                    line.zero_()
                elif state_of_parameter[name].data_ptr() != line.data_ptr():
                    line.copy_(state_of_parameter[name].view_as(line))

    def rows(self, groups: dict[Any, int], state: dict[Any, Any]) -> list[tuple[_Key, _Row]]:
        """Its parameters, consecutive ones of one key together."""
        master, copy = self.lines[0], self.lines[-1]
        rows: list[tuple[_Key, _Row]] = []
        for parameter, (lo, numel) in self._places.items():
            if parameter not in groups:
                continue  # the factory left it out
            count = float(state.get(parameter, {}).get("step", 0.0))
            key = (groups[parameter], count, master.dtype, None if copy is None else copy.dtype)
            row = _Row(self, lo, lo + numel, (parameter,))
            if rows and rows[-1][0] == key and rows[-1][1].hi == lo:
                before = rows.pop()[1]
                row = _Row(self, before.lo, row.hi, (*before.parameters, parameter))
            rows.append((key, row))
        return rows
