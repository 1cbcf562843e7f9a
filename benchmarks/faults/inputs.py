"""Options and inputs that mean nothing: each is refused in one error of ours, by the functions and on the command line.

Everything here is to be refused; what is accepted counts as wrong.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cluster import ClusterSpec, as_cluster
from autopar.errors import AutoparError
from autopar.models.job import constraints_of, load_job
from autopar.models.loading import load_model
from autopar.plan import Plan
from autopar.settings.constraints import Constraints
from autopar.training.config import TrainerConfig
from benchmarks.faults.case import Case, Result, drawn
from examples.models import EXAMPLES

NAN, INF = float("nan"), float("inf")
HERE = "benchmarks.faults.inputs"
TWO = "2 a100-80g"

CONSTRAINTS: tuple[Any, ...] = (
    *("abc", 3, ["tp"], [("tp", 2)], True, b"tp"),
    *(
        {axis: value}
        for axis in ("dp", "tp", "pp", "ddp", "ep")
        for value in (0, -1, 1.5, "2", True, None, [2], NAN, {})
    ),
    *({"zero": value} for value in (4, -1, "3", True, 2.0, None)),
    *({"micro_batches": value} for value in (0, -2, 1.5, "many", False)),
    *({"memory": value} for value in (0, -1, "0GiB", "20 parsecs", NAN, INF, True, [1], "1e9", "-1GiB", "0.1b", "")),
    *({"schedule": value} for value in ("1F1B", 3, [], "none")),
    *({"chunks": value} for value in (0, "two", 1.5)),
    *({"recompute": value} for value in ("some", True, [], 1)),
    *({"offload": value} for value in ("disk", "nvme:", "nvme:relative", True, 3, ["optimizer"], "nvme:/a\nb")),
    *({"context": value} for value in ("rings", 1)),
    *({"parameters": value} for value in ("x", ["x"], {"*": "S(0)"}, {"*": {"tp": "Q"}}, {"*": {"xp": "R"}}, {"*": 3})),
    *({"activations": {"*": {"tp": value}}} for value in ("S", "S(-1)", 5)),
    *({name: 2} for name in ("tpp", "TP", "data_parallel", "", 7, None, "sp")),
    *({"chunks": 2, "schedule": schedule} for schedule in ("gpipe", "1f1b", "zero-bubble")),
    *({"pp": 1, "schedule": "1f1b"}, {"pp": 1, "chunks": 2}, {"offload": "parameters", "zero": 1}),
    {"cp": 1, "context": "ring"},
)

COMPILE: tuple[tuple[str, Any], ...] = (
    *(("model", value) for value in (None, 3, "gpt2", nn.Linear, dict)),
    *(("cluster_spec", value) for value in (None, 2, 2.0, ["2 a100-80g"], "", "nonsense", "0 a100-80g", "-2 a100-80g")),
    *(("example_inputs", value) for value in (None, 3, "text", (), {}, {"a b": 1}, {"class": 1}, {3: 1}, {"x": None})),
    *(("loss_fn", value) for value in (3, "mse", nn.Module)),
    *(("global_batch_size", value) for value in (0, -8, 1.5, "8", True, NAN, [8])),
    *(("optimizer", value) for value in (3, "adamw")),
    *(("precision", value) for value in ("fp17", "FP32", 32, None, ["fp32"], torch.float32)),
    *(("constraints", value) for value in ("abc", 3, {"tpp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"micro_batches": 3})),
    *(("kernels", value) for value in ("yes", True, None, [])),
    *(
        ("compression", value)
        for value in ("int8", ["int8"], {"gather": "int4"}, {"scatter": "int8"}, {"gather": None})
    ),
    *(("fp8", value) for value in ("yes", 1, [])),
    *(("backend", value) for value in ("cuda", None, [], 3, True)),
    *(("plan", value) for value in (3, [], "missing.yaml", ".", {"model": "x"})),
)

VERIFY: tuple[tuple[str, Any], ...] = (
    *(("steps", value) for value in (0, -1, 1.5, "3", True)),
    *(("max_grad_norm", value) for value in (-1.0, 0, NAN, "1", True)),
    *(("seed", value) for value in (-1, 0.5, "0")),
)

CLUSTERS: tuple[Any, ...] = (
    *(
        None,
        2,
        2.0,
        [],
        b"2 a100-80g",
        "",
        " ",
        "2",
        "a100-80g",
        "2 a100",
        "2x a100-80g",
        "x2 a100-80g",
        "1.5 a100-80g",
    ),
    *("0 a100-80g", "2x0 a100-80g", "-1 a100-80g", "2 a100-80g ethernet", "2 a100-80g nvlink3 ib-200g more", "2 + 2"),
    *("2 a100-80g + ", "+", "2 a100-80g via", "2 a100-80g; import os", "٢ a100-80g", "x" * 10000),
    *("9" * 40 + " a100-80g", "9" * 5000 + " a100-80g", "missing.toml", "\0.toml"),
)

DEVICE = (
    'devices_per_node = 2\n[device]\nname = "d"\nmemory_bytes = 1000000000\nmemory_bytes_per_second = 1e11\n'
    "peak_flops_per_second = {fp32 = 1e12}\nkernel_launch_seconds = 1e-6\n"
)
TOMLS: tuple[str, ...] = (
    *(
        "",
        "x",
        "[",
        "a = 1",
        "devices_per_node = 2",
        'devices_per_node = 2\ndevice = "a100"',
        "device = 3",
        "group = 3",
    ),
    *('devices_per_node = "2"\ndevice = "a100-80g"', 'devices_per_node = 0\ndevice = "a100-80g"', "group = [1]"),
    *('devices_per_node = true\ndevice = "a100-80g"', 'devices_per_node = 2\ndevice = ["a100-80g"]', "group = []"),
    *('devices_per_node = 2\ndevice = "a100-80g"\nintra_node = {}', 'devices_per_node = -2\ndevice = "a100-80g"'),
    *('devices_per_node = 2\ndevice = "a100-80g"\nintra_node = 5', "a = " + "[" * 5000 + "]" * 5000),
    *(DEVICE.replace("1000000000", value) for value in ("0", "-1", "nan", '"1"', "true", "1.5")),
    *(DEVICE.replace("1e11", value) for value in ("0", "-1.0", "nan", "inf", '"x"')),
    *(DEVICE.replace("1e12", value) for value in ("0", "nan", '"x"')),
    DEVICE.replace('"d"', '"d\\n[x]"'),
)
"""Texts of cluster files."""

FILES: Mapping[str, bytes] = {
    "empty": b"",
    "list": b"- tp: 2\n",
    "text": b"tp 2\n",
    "number": b"3\n",
    "twice": b"tp: 2\ntp: 4\n",
    "latin-1": b"tp: 2 # caf\xe9\n",
    "utf-16": "tp: 2\n".encode("utf-16"),
    "binary": bytes(range(256)),
    "zeros": b"\0" * 100,
    "bracket": b"tp: [1\n",
    "tab": b"tp:\n\t- 2\n",
    "tag": b"tp: !!python/object/apply:os.getcwd []\n",
    "deep": b"tp: " + b"[\n" * 1500 + b"]" * 1500,
    "bomb": b"".join(
        b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9 if n else [b"x"] * 9)) for n in range(9)
    ),
    "key": b"? [a, b]\n: 2\n",
    "huge": b"tp: 0x" + b"f" * 9000,
    "large": b"#" * (17 * 2**20),
}

MODELS: tuple[Any, ...] = (
    *(
        None,
        3,
        "",
        ":",
        "x",
        "x:",
        ":x",
        "no.such.module:gpt2",
        "examples.models:nothing",
        "examples.models:",
        "os:path",
    ),
    *(
        "examples.models:EXAMPLES",
        "..:x",
        "hf:",
        "hf:/nowhere",
        "hf:/",
        f"{HERE}:raises",
        f"{HERE}:leaves",
        f"{HERE}:junk",
    ),
    *(f"{HERE}:nothing", f"{HERE}:pair_of_junk", f"{HERE}:needs_arguments", "json:loads", "examples.models:gpt2.x"),
    *("examples.models:gpt2\n", "examples models:gpt2", "hf:\0"),
)

JOBS: tuple[dict[str, Any], ...] = (
    *({"batch": value} for value in (0, -1)),
    *({"seq": value} for value in (0, -3)),
    *({"options": {"layers": value}} for value in ("two", 1.5, [])),
    {"options": {"width": 33}},
)

LINES: tuple[str, ...] = (
    *("plan", "plan examples.models:mlp --cluster", "paln x", "plan a b", "--nonsense", "plan examples.models:mlp --x"),
    *(f"plan examples.models:mlp --cluster '{text}'" for text in ("2 b100", "", "missing.toml", "0 a100-80g", ".")),
    *(f"plan examples.models:mlp --cluster '{TWO}' --set {text}" for text in ("'dp=[1'", "dp", "=2", "dp=1.5", "tp=0")),
    *(f"plan examples.models:mlp --cluster '{TWO}' --set {text}" for text in ("zz=1", "dp=yes", "'dp={'", "zero=9")),
    *(
        f"plan examples.models:mlp --cluster '{TWO}' {text}"
        for text in ("--batch 0", "--batch -4", "--batch x", "--seq 0")
    ),
    *(
        f"plan examples.models:mlp --cluster '{TWO}' {text}"
        for text in ("--memory 0", "--memory lots", "--precision fp9")
    ),
    *(f"plan examples.models:mlp --cluster '{TWO}' {text}" for text in ("--constraints nope.yaml", "--constraints .")),
    *(f"plan examples.models:mlp --cluster '{TWO}' {text}" for text in ("--compress int8", "--compress gather=int3")),
    *(f"plan examples.models:mlp --cluster '{TWO}' {text}" for text in ("--backend fast", "-o layers=x", "-o 'x=['")),
    *(f"plan examples.models:mlp --cluster '{TWO}' {text}" for text in ("--set dp=2 --set dp=1", "--set dp=3")),
    *("report nope.yaml", "report .", "report x", "compare nope.yaml nope.yaml", "compare x", "verify x --steps 0"),
    *(
        "explain nope.yaml",
        "tune nope",
        "train nope.yaml",
        "train nope.toml",
        "simulate examples.models:mlp --set tp=0",
    ),
    f"simulate examples.models:mlp --cluster '{TWO}' --framework nothing --set dp=2",
    f"simulate examples.models:mlp --cluster '{TWO}' --precision fp3 --set dp=2",
    f"simulate examples.models:mlp --cluster '{TWO}' --set dp=2 --what-if 'tp=['",
    f"simulate examples.models:mlp --cluster '{TWO}' --set dp=2 --what-if x",
)


def refused(attempt: Callable[[], Any]) -> Result:
    """Clear where an error of ours says so with more than its first line, or where that one needs no more."""
    try:
        found = attempt()
    except AutoparError as error:
        return Result("refused", str(error).splitlines()[0])
    except Exception as error:
        return Result("raw", " ".join(f"{type(error).__name__}: {error}".split())[:200])
    return Result("wrong", f"accepted: {type(found).__name__}")


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some hundred milliseconds."""
    return drawn(itertools.chain(_of_functions(), _of_files(), _of_commands()), count, seed)


def _case(name: str, attempt: Callable[[], Any]) -> Case:
    return Case(name[:160], lambda: refused(attempt))


def _of_functions() -> Iterator[Case]:
    for given in CONSTRAINTS:
        yield _case(f"constraints={given!r}", lambda given=given: Constraints.parse(given))
    for name, value in COMPILE:
        yield _case(f"compile {name}={value!r}", lambda name=name, value=value: _compile(**{name: value}))
    for name, value in VERIFY:
        yield _case(f"verify {name}={value!r}", lambda name=name, value=value: _verify(**{name: value}))
    for text in CLUSTERS:
        yield _case(f"cluster {text!r}", lambda text=text: as_cluster(text))
    for model in MODELS:
        yield _case(f"model {model!r}", lambda model=model: load_model(model))
    for given in JOBS:
        options = {"batch": None, "seq": None, "options": {}, "num_devices": 1, "meta": False} | given
        yield _case(f"job {given!r}", lambda options=options: load_job("examples.models:gpt2", **options))


def _of_files() -> Iterator[Case]:
    for number, text in enumerate(TOMLS):
        yield _case(
            f"cluster file {number}: {text!r}", lambda text=text: _with_file(text.encode(), ".toml", ClusterSpec.parse)
        )
    readers: tuple[tuple[str, Callable[[str], Any]], ...] = (
        ("constraints", lambda path: Constraints.parse(constraints_of((), None, path))),
        ("configuration", TrainerConfig.from_file),
        ("plan", Plan.from_file),
    )
    for (what, read), (kind, content) in itertools.product(readers, FILES.items()):
        yield _case(f"{what} file: {kind}", lambda read=read, content=content: _with_file(content, ".yaml", read))
    for what, read in readers:
        for path in (".", "/", "nope.yaml", "/nowhere/x.yaml", "\0", ""):
            yield _case(f"{what} file {path!r}", lambda read=read, path=path: read(path))


def _of_commands() -> Iterator[Case]:
    for line in LINES:
        yield Case(f"autopar {line}", lambda line=line: _command(line))  # type: ignore[misc]


def _command(line: str) -> Result:
    import shlex

    result = CliRunner().invoke(app, shlex.split(line))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Result("raw", f"{type(result.exception).__name__}: {result.exception}"[:200])
    text = result.stderr.strip().splitlines()
    if result.exit_code in (1, 2):
        return Result("raw" if any("Traceback" in each for each in text) else "refused", text[0] if text else "")
    return Result(
        "raw" if result.exit_code else "wrong", f"exit code {result.exit_code}: {text[-1] if text else ''}"[:300]
    )


def _with_file(content: bytes, ending: str, read: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"given{ending}"
        path.write_bytes(content)
        return read(str(path))


def _compile(**changed: Any) -> Any:
    example = EXAMPLES["mlp"]()
    given = {"model": example.model, "cluster_spec": TWO, "example_inputs": example.inputs, "loss_fn": example.loss_fn}
    return autopar.compile(**(given | changed))  # type: ignore[arg-type]


def _verify(**changed: Any) -> Any:
    example = EXAMPLES["mlp"]()
    return autopar.verify(example.model, TWO, example_inputs=example.inputs, loss_fn=example.loss_fn, **changed)


# --- factories that are none ------------------------------------------------------------------------------------------


def raises() -> None:
    """A factory with a defect."""
    raise RuntimeError("a defect of the user's")


def leaves() -> None:
    """A factory that ends the process."""
    raise SystemExit(3)


def junk() -> str:
    """No model."""
    return "a model"


def nothing() -> None:
    """Nothing at all."""


def pair_of_junk() -> tuple[str, int]:
    """No model either."""
    return "a model", 3


def needs_arguments(model: nn.Module) -> nn.Module:
    """A function that is no factory."""
    return model
