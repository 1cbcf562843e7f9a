"""From the arguments of a Megatron-LM case to the blocks of its last rank, by virtual stage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.published_runs.rows import Row, SkippedError
from cost_models.megatron_core import Block, Model

HYBRID = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""A letter of --hybrid-layer-pattern -> a block."""

Args = Mapping[str, Any]
Layers = list[tuple[str, ...]]
"""The kinds of the blocks of each layer."""


def blocks_of(row: Row, model: Model) -> tuple[tuple[Block, ...], ...]:
    """Raises SkippedError."""
    args, pp, cp = row["args"], row["pp"], row["cp"]
    if model.family == "t5":
        return (_t5(args, pp),)
    stages = _stages(args, pp * _virtual_stages(args, pp), model.extra_predictions)
    keys = int(args["seq-length"])
    return tuple(
        tuple(Block(kind, keys // cp, keys) for layer in stage for kind in layer) for stage in stages[pp - 1 :: pp]
    )


def _t5(args: Args, pp: int) -> tuple[Block, ...]:
    if pp > 1:
        raise SkippedError("T5 over several stages")
    encoder, decoder = int(args["encoder-seq-length"]), int(args["decoder-seq-length"])
    first = (Block("attention", encoder, encoder), Block("mlp", encoder, encoder))
    second = (Block("attention", decoder, decoder), Block("cross", decoder, encoder), Block("mlp", decoder, decoder))
    return first * int(args["encoder-num-layers"]) + second * int(args["decoder-num-layers"])


def _virtual_stages(args: Args, pp: int) -> int:
    """Of each rank."""
    if "hybrid-layer-pattern" in args:
        return max(str(args["hybrid-layer-pattern"]).split("/")[0].count("|") + 1, pp) // pp
    if layout := str(args.get("pipeline-model-parallel-layout", "")):
        return len(_layout(layout)) // pp
    if each := int(args.get("num-layers-per-virtual-pipeline-stage", 0)):
        return int(args["num-layers"]) // pp // each
    return int(args.get("num-virtual-stages-per-pipeline-rank", 1))


def _stages(args: Args, stages: int, predictions: int) -> list[Layers]:
    """The layers of all virtual stages, in the order of the model; extra predictions where the layout has them."""
    if "hybrid-layer-pattern" in args:
        main, *extra = str(args["hybrid-layer-pattern"]).split("/")
        parts = main.split("|")
        if len(parts) != stages:
            raise SkippedError("a hybrid pattern that names other stages than there are")
        found = [[(HYBRID[kind],) for kind in part] for part in parts]
        found[-1] += [("prediction", *(HYBRID[kind] for kind in part)) for part in extra]
        return found
    number = int(args["num-layers"])
    kinds: Layers = [("attention", "moe" if has else "mlp") for has in _have_experts(args, number)]
    predicting = stages - 1
    if layout := str(args.get("pipeline-model-parallel-layout", "")):
        texts = _layout(layout)
        counts = [text.count("t") for text in texts]
        predicting = next((index for index, text in enumerate(texts) if "m" in text), predicting)
    else:
        counts = _counts(args, number, stages)
    cuts = [sum(counts[:index]) for index in range(stages + 1)]
    found = [kinds[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    found[predicting] += [("prediction", *kinds[-1])] * predictions
    return found


def _have_experts(args: Args, layers: int) -> list[bool]:
    """Every layer, each n-th, or as moe-layer-freq's sum of lists says."""
    if not int(args.get("num-experts", 0)):
        return [False] * layers
    text = str(args.get("moe-layer-freq", "1")).replace(" ", "")
    if text.isdigit():
        return [index % int(text) == 0 for index in range(layers)]
    parts = re.findall(r"\[([01](?:,[01])*)\](?:\*(\d+))?", text)
    found = [kind == "1" for kinds, times in parts for kind in kinds.split(",") * int(times or 1)]
    if len(found) != layers:
        raise SkippedError(f"moe-layer-freq {text} is not understood")
    return found


def _layout(text: str) -> list[str]:
    """The letters of each stage of a layout such as Et*3|(tt|)*6mL, written out."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), text.replace(" ", ""))
    return re.sub(r"([a-zA-Z])\*(\d+)", lambda match: match[1] * int(match[2]), text).split("|")


def _counts(args: Args, layers: int, stages: int) -> list[int]:
    """Layers of each stage: even, but for what is given of the first and the last."""
    first, last = (args.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    rest = layers - int(first or 0) - int(last or 0)
    others = stages - (first is not None) - (last is not None)
    if rest % max(others, 1) == 0:
        middle = [rest // max(others, 1)] * others
        return [*([int(first)] if first is not None else []), *middle, *([int(last)] if last is not None else [])]
    if (layers + 2) % stages == 0:  # the embedding and the loss count as a layer each (account-for-... in the case)
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    raise SkippedError("layers do not divide into the stages")
