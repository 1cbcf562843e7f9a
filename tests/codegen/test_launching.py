"""How saved programs are started on several nodes: torchrun's lines, the Slurm script as bash, the manifest as YAML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autopar
from codegen.source.launching import NodeGroup, Nodes, pytorch_job, single_node, slurm_script, usage
from examples.models import EXAMPLES
from tests import forked

TWO = Nodes((NodeGroup(2, 8, device="h100-sxm"),))
UNLIKE = Nodes((NodeGroup(1, 2, device="a100-80g"), NodeGroup(2, 1, device="l4")))
C10D = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500"


def test_torchruns_lines() -> None:
    assert usage(single_node(4), "main.py") == "torchrun --nproc-per-node 4 main.py"
    assert usage(TWO, "main.py").splitlines()[1].strip() == f"{C10D} main.py"
    first, second = usage(UNLIKE, "main.py").splitlines()[1::2]
    ends = "--master-addr HOST --master-port 29500 main.py"
    assert first.strip() == f"torchrun --nnodes 3 --node-rank N --nproc-per-node 2 {ends}"
    assert "--nproc-per-node 1 " in second and "nodes 1 to 2 (l4)" in usage(UNLIKE, "main.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two nodes with two processes each."""
    example = EXAMPLES["gpt2"](layers=1, width=16, num_heads=2, batch_size=4, seq_len=8)
    program = autopar.compile(example.model, "2x2 cpu", example_inputs=example.inputs, constraints={"dp": 4})
    return program.save(tmp_path_factory.mktemp("saved") / "program")


def test_the_folder_says_how_it_is_started(folder: Path) -> None:
    line = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert f"    {line} main.py --steps 10\n" in (folder / "main.py").read_text()
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    done = forked.run([str(folder / "main.py")], env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "this program is for 4 processes, 1 run" in done.stderr
    assert f"{line} {folder / 'main.py'}" in done.stderr


@pytest.mark.parametrize("nodes", [TWO, UNLIKE, single_node(4), Nodes((NodeGroup(3, 4, is_gpu=False),))])
def test_slurm_scripts_are_bash(nodes: Nodes, tmp_path: Path) -> None:
    text = slurm_script('Odd "name" $(touch x)', nodes) if nodes is TWO else slurm_script("GPT2", nodes)
    script = tmp_path / "slurm.sbatch"
    script.write_text(text)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for group in nodes.groups:
        gives = f"--gpus-per-node={group.ranks_per_node}" if group.is_gpu else f"--cpus-per-task={group.ranks_per_node}"
        assert f"#SBATCH --nodes={group.num_nodes}" in asked and f"#SBATCH {gives}" in asked
    assert asked.count("#SBATCH hetjob") == len(nodes.groups) - 1
    assert asked.count("#SBATCH --ntasks-per-node=1") == len(nodes.groups)


STUB = """#!/bin/bash
# srun: as many tasks as TASKS, at once on this machine, each with its number
while [[ "$1" == --* ]]; do shift; done
for task in $(seq 0 $((TASKS - 1))); do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


def run_script(script: Path, folder: Path, tmp_path: Path, tasks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The script with a stub of srun, a scontrol that says this machine, and torchrun of this Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (
        ("srun", STUB),
        ("scontrol", "#!/bin/bash\necho localhost\n"),
        ("torchrun", f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    more = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "TASKS": str(tasks), "SLURM_JOB_ID": str(os.getpid())}  # fmt: skip
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = ["bash", str(script), *words]
    return subprocess.run(command, env=outside | more, capture_output=True, text=True, timeout=400)


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.distributed
def test_the_slurm_script_trains(folder: Path, tmp_path: Path) -> None:
    """Two torchruns on this machine find each other and train the four ranks."""
    script = tmp_path / "slurm.sbatch"
    script.write_text((folder / "slurm.sbatch").read_text().replace("29500", str(free_port())))
    done = run_script(script, folder, tmp_path, 2, "--steps", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(" loss")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]


@pytest.mark.slow
@pytest.mark.distributed
def test_unlike_nodes_have_the_ranks_of_their_kind(tmp_path: Path) -> None:
    """Three torchruns of 2, 1 and 1 ranks, started in any order: each node has the ranks that the plan put there."""
    script = tmp_path / "slurm.sbatch"
    script.write_text(slurm_script("GPT2", UNLIKE).replace("29500", str(free_port())))
    (tmp_path / "main.py").write_text(
        "import os\nwords = [os.environ[n] for n in ('GROUP_RANK', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())  # at once, and so whole\n"
    )
    done = run_script(script, tmp_path, tmp_path, 3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")[:-1]) == ["0 0 0 4", "0 1 1 4", "1 2 0 4", "2 3 0 4"]


def test_the_manifest_is_a_pytorch_job(folder: Path) -> None:
    saved = yaml.safe_load((folder / "pytorchjob.yaml").read_text())
    job = yaml.safe_load(pytorch_job("Llama For Causal LM", TWO) or "")
    for found, ranks in ((saved, 2), (job, 8)):
        assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        assert found["spec"]["nprocPerNode"] == str(ranks)
        replicas = found["spec"]["pytorchReplicaSpecs"]
        assert {role: each["replicas"] for role, each in replicas.items()} == {"Master": 1, "Worker": 1}
        for each in replicas.values():
            (container,) = each["template"]["spec"]["containers"]
            assert container["name"] == "pytorch" and container["command"][:2] == ["torchrun", "/program/main.py"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in each["template"]["spec"]["volumes"]}
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert job["metadata"]["name"] == "llama-for-causal-lm"
    alone = yaml.safe_load(pytorch_job("x", single_node(8)) or "")
    assert alone["spec"]["pytorchReplicaSpecs"].keys() == {"Master"}
    assert pytorch_job("x", UNLIKE) is None
