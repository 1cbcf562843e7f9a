"""Problems shaped like a transformer's decision graph, for timing and for tests. Not a test module."""

from __future__ import annotations

import numpy as np

from search import Edge, Problem, Variable

# Offsets within a layer: 0 norm, 1 q, 2 k, 3 v, 4 rope q, 5 rope k, 6 attention, 7 out, 8 add, 9 norm, 10 mlp, 11 add.
ATTENTION = ((0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (4, 6), (5, 6), (3, 6), (6, 7), (7, 8))
LAYER = (*ATTENTION, (8, 9), (9, 10), (10, 11), (8, 11))
LAYER_SIZE = 12
NORM, ROPE_Q, ROPE_K, FIRST_ADD, LAST = 0, 4, 5, 8, 11


def edge_list(num_layers: int) -> list[tuple[int, int]]:
    """Embed (0), a rotary table (1), the layers, a head (last): residual skips, the rotary table feeds every layer."""
    edges, stream = [(0, 1)], 0
    for layer in range(num_layers):
        base = 2 + layer * LAYER_SIZE
        edges += [(base + a, base + b) for a, b in LAYER]
        edges += [(stream, base + NORM), (stream, base + FIRST_ADD), (1, base + ROPE_Q), (1, base + ROPE_K)]
        stream = base + LAST
    head = 2 + num_layers * LAYER_SIZE
    # Tied embedding closes one long cycle; two self loops as in a layer solved once for many.
    return [*edges, (stream, head), (0, head), (head, head), (stream, stream)]


def transformer(seed: int, *, num_layers: int = 12, structured: bool, budget_fraction: float | None = None) -> Problem:
    """About 12 * num_layers + 3 variables of 40 to 80 options.

    Args:
        seed: of all random numbers.
        structured: edges cost what changing between two of 9 layouts costs (many ties); otherwise every cell is random.
        budget_fraction: None for no budget; else the limit's place between the least and a usual usage.
    """
    rng = np.random.default_rng(seed)
    num_variables = 3 + num_layers * LAYER_SIZE
    sizes = rng.integers(40, 81, size=num_variables)
    reshard = rng.random((9, 9)) * 1e-3
    np.fill_diagonal(reshard, 0.0)
    layouts = [(rng.integers(0, 9, size=size), rng.integers(0, 9, size=size)) for size in sizes]
    variables = []
    for index, size in enumerate(sizes):
        seconds = rng.random(size) * 1e-3
        num_bytes = np.rint(1e9 * rng.random(size) * (1.5 - seconds / 1e-3))
        variables.append(Variable(f"op{index}", seconds, num_bytes))
    edges = []
    for a, b in edge_list(num_layers):
        costs = reshard[layouts[a][1]][:, layouts[b][0]] if structured else rng.random((sizes[a], sizes[b])) * 1e-3
        edges.append(Edge(a, b, costs))
    if budget_fraction is None:
        return Problem(tuple(variables), tuple(edges))
    least = sum(float(variable.usage.min()) for variable in variables)
    usual = sum(float(variable.usage[np.argmin(variable.costs)]) for variable in variables)
    return Problem(tuple(variables), tuple(edges), least + budget_fraction * (usual - least))
