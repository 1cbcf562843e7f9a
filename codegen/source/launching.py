"""The start of a saved program on the nodes that it was planned for: torchrun's line, a Slurm script, a Kubernetes
manifest (Kubeflow's PyTorchJob)."""

from __future__ import annotations

import re
from dataclasses import dataclass

PORT = 29500
_RENDEZVOUS = f"--rdzv-backend c10d --rdzv-endpoint HOST:{PORT}"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes. device: what its devices are called; is_gpu: whether a scheduler has to give them."""

    num_nodes: int
    ranks_per_node: int
    device: str = ""
    is_gpu: bool = True


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a program, in the order of its ranks."""

    groups: tuple[NodeGroup, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of all groups."""
        return sum(group.num_nodes for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(group.num_nodes * group.ranks_per_node for group in self.groups)

    @property
    def launchers(self) -> tuple[str, ...]:
        """Return the commands of each group's nodes, up to the script: HOST is the first node, N the node's number.

        Nodes of one kind may take their numbers as they come. Of several kinds each has its own, since ranks that a
        plan put on one kind of node must be there.
        """
        first = self.groups[0]
        if self.num_nodes == 1:
            return (f"torchrun --nproc-per-node {first.ranks_per_node}",)
        if len(self.groups) == 1:
            return (f"torchrun --nnodes {first.num_nodes} --nproc-per-node {first.ranks_per_node} {_RENDEZVOUS}",)
        ends = f"--master-addr HOST --master-port {PORT}"
        return tuple(
            f"torchrun --nnodes {self.num_nodes} --node-rank N --nproc-per-node {group.ranks_per_node} {ends}"
            for group in self.groups
        )

    @property
    def where(self) -> tuple[str, ...]:
        """The nodes that each line of `launchers` is for, in words."""
        if self.num_nodes == 1:
            return ("",)
        if len(self.groups) == 1:
            return ("on every node, where HOST is one of them",)
        lines, first = [], 0
        for group in self.groups:
            last = first + group.num_nodes - 1
            numbers = f"node {first}" if first == last else f"nodes {first} to {last}"
            lines.append(
                f"on {numbers} ({group.device or 'of one kind'}), where HOST is node 0 and N the node's number"
            )
            first = last + 1
        return tuple(lines)


def single_node(num_ranks: int) -> Nodes:
    """All ranks on one machine."""
    return Nodes((NodeGroup(1, num_ranks),))


def usage(nodes: Nodes, words: str) -> str:
    """The lines that start `words` (a script and its arguments), for a person."""
    if nodes.num_nodes == 1:
        return f"{nodes.launchers[0]} {words}"
    lines = zip(nodes.where, nodes.launchers, strict=True)
    return "\n".join(f"{where}:\n    {launcher} {words}" for where, launcher in lines)


# Slurm ----------------------------------------------------------------------------------------------------------------

_SBATCH = """#!/bin/bash
# Trains {name} on {cluster}, with one task per node: each is a torchrun that starts the ranks of its node.
# In this folder:  sbatch slurm.sbatch --steps 1000 --checkpoint /shared/checkpoints --checkpoint-every 100
#SBATCH --job-name={job}
{resources}
# Slurm tells the program to end so many seconds before it does: it writes a checkpoint then, and is queued again.
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -euo pipefail
PROGRAM="${{PROGRAM:-${{SLURM_SUBMIT_DIR:-$PWD}}}}"  # this folder; all nodes must see it
HOST="$(scontrol show hostnames "${nodelist}" | head -n 1)"
export PROGRAM HOST OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"

{command}
"""
_SAME = """srun --kill-on-bad-exit=1 torchrun --nnodes {nodes} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$HOST:{port}" --rdzv-id "${{SLURM_JOB_ID:-0}}" "$PROGRAM/main.py" "$@"
"""
_UNLIKE = """# Nodes of several kinds are a heterogeneous job, whose tasks are numbered group by group, as ranks are.
export RANKS="{ranks}"  # of each node
srun --het-group={groups} --kill-on-bad-exit=1 bash -c '
    ranks=($RANKS)
    exec torchrun --nnodes {nodes} --node-rank "$SLURM_PROCID" --nproc-per-node "${{ranks[$SLURM_PROCID]}}" \\
        --master-addr "$HOST" --master-port {port} "$PROGRAM/main.py" "$@"
' task "$@"
"""


def slurm_script(name: str, nodes: Nodes) -> str:
    """The text of `slurm.sbatch`."""
    first = nodes.groups[0]
    if len(nodes.groups) == 1:
        command = _SAME.format(nodes=first.num_nodes, ranks=first.ranks_per_node, port=PORT)
    else:
        rank_counts = (str(group.ranks_per_node) for group in nodes.groups for _ in range(group.num_nodes))
        groups = ",".join(str(number) for number in range(len(nodes.groups)))
        command = _UNLIKE.format(nodes=nodes.num_nodes, ranks=" ".join(rank_counts), groups=groups, port=PORT)
    return _SBATCH.format(
        name=name,
        cluster=_cluster(nodes),
        job=_label(name),
        resources="\n#SBATCH hetjob\n".join(_resources(group) for group in nodes.groups),
        nodelist="SLURM_JOB_NODELIST" if len(nodes.groups) == 1 else "SLURM_JOB_NODELIST_HET_GROUP_0",
        command=command.rstrip("\n"),
    )


def _resources(group: NodeGroup) -> str:
    gives = f"--gpus-per-node={group.ranks_per_node}" if group.is_gpu else f"--cpus-per-task={group.ranks_per_node}"
    exclusive = ["--exclusive"] if group.is_gpu else []
    words = (f"--nodes={group.num_nodes}", "--ntasks-per-node=1", gives, *exclusive)
    return "\n".join(f"#SBATCH {word}" for word in words)


# Kubernetes -----------------------------------------------------------------------------------------------------------

_JOB = """# Trains {name} on {cluster} with Kubeflow's training operator:  kubectl apply -f pytorchjob.yaml
# Fill in: the image (torch and safetensors) and the claims of volumes that all nodes share. The operator tells torchrun
# the number of nodes and where the first one is.
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {job}
spec:
  nprocPerNode: "{ranks}"
  runPolicy:
    cleanPodPolicy: None
    backoffLimit: 10
  pytorchReplicaSpecs:
{replicas}"""
_REPLICA = """    {role}:
      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE
              command:
                - torchrun
                - /program/main.py
                - --steps=1000
                - --checkpoint=/checkpoints
                - --checkpoint-every=100
{resources}              volumeMounts:
                - {{name: program, mountPath: /program}}
                - {{name: checkpoints, mountPath: /checkpoints}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - {{name: program, persistentVolumeClaim: {{claimName: PROGRAM-CLAIM}}}}
            - {{name: checkpoints, persistentVolumeClaim: {{claimName: CHECKPOINT-CLAIM}}}}
            - {{name: shm, emptyDir: {{medium: Memory}}}}
"""
_GPUS = """              resources:
                limits: {{nvidia.com/gpu: {count}}}
"""


def pytorch_job(name: str, nodes: Nodes) -> str | None:
    """The text of `pytorchjob.yaml`; None for nodes of several kinds, which a PyTorchJob's workers cannot be."""
    if len(nodes.groups) > 1:
        return None
    (group,) = nodes.groups
    resources = _GPUS.format(count=group.ranks_per_node) if group.is_gpu else ""
    counts = [("Master", 1), *([("Worker", group.num_nodes - 1)] if group.num_nodes > 1 else [])]
    return _JOB.format(
        name=name,
        cluster=_cluster(nodes),
        job=_label(name),
        ranks=group.ranks_per_node,
        replicas="".join(_REPLICA.format(role=role, count=count, resources=resources) for role, count in counts),
    )


def _cluster(nodes: Nodes) -> str:
    return " + ".join(
        f"{g.num_nodes} node{'s' if g.num_nodes > 1 else ''} of {g.ranks_per_node}{f' {g.device}' if g.device else ''}"
        for g in nodes.groups
    )


def _label(name: str) -> str:
    """A name as Kubernetes and Slurm take it: lower-case letters, digits and hyphens, 50 at most."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") or "program"
