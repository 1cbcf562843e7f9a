"""Tiny models of many architectures, each with a batch: `ZOO[name].build()`.

examples/models.py has the models that autopar is developed on. This table has models that differ from them.
Configurations of transformers' classes are in examples/zoo_configs.py and zoo_encoders.py, modules written by hand in
zoo_models.py and zoo_modules.py. Most have two layers; batches hold 8 rows of 16 positions, 16 x 16 pixels or a few
features, of a vocabulary of 96. No dropout; every factory is seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models import EXAMPLES, Example, bert, llama, rotary_lm, t5, tokens_and_labels, transformers_model, vit
from examples.zoo_configs import (
    CAUSAL,
    EAGER,
    EXPERTS,
    IMAGE_SIZES,
    SEQ2SEQ,
    SEQ2SEQ_SIZES,
    SEQ_LEN,
    STATE_SPACE,
    TEXT_SIZES,
    VOCAB_SIZE,
    WIDTH,
    Table,
)
from examples.zoo_encoders import ENCODER_SIZES, IMAGES, MASKED
from examples.zoo_models import DLRM, LSTMLanguageModel, SwitchMLP, TwoTower, UNet, with_lora
from examples.zoo_modules import Autoencoder, Conformer, DiT, GraphNetwork, Mixer, Siamese

ROWS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One architecture.

    build: returns a model with its batch. axes: "ep" (experts) and "cp" (causal attention, state spaces), if they
    suit its calls.
    """

    family: str
    build: Callable[[], Example]
    axes: tuple[str, ...] = ()


def _no_dropout(family: str) -> dict[str, float]:
    """Return zero for each field of the configuration that is a dropout rate by default."""
    import transformers

    defaults = getattr(transformers, f"{family}Config")().to_dict()
    return {name: 0.0 for name, value in defaults.items() if "drop" in name and isinstance(value, float)}


def _causal(family: str, settings: Mapping[str, Any]) -> Example:
    return rotary_lm(family, {**_no_dropout(family), **settings})


def _masked(family: str, settings: Mapping[str, Any]) -> Example:
    settings = {**ENCODER_SIZES, **_no_dropout(family), **settings}
    inputs = dict(bert().inputs)
    if family == "Longformer":  # which asks whether a mask has global attention, and knows it of the mask it makes
        del inputs["attention_mask"]
    model = transformers_model(f"{family}ForMaskedLM", f"{family}Config", 0, settings)
    return replace(bert(), model=model, inputs=inputs)


def _seq2seq(family: str, settings: Mapping[str, Any]) -> Example:
    settings = {**SEQ2SEQ_SIZES, "max_position_embeddings": SEQ_LEN, **_no_dropout(family), **settings}
    class_name = "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"
    return replace(t5(), model=transformers_model(class_name, f"{family}Config", 0, settings))


def _image(family: str, settings: Mapping[str, Any]) -> Example:
    settings = {"num_labels": 12, **EAGER, **_no_dropout(family), **settings}
    size = settings.get("image_size", 16)
    side = size if isinstance(size, int) else size[0]
    model = transformers_model(f"{family}ForImageClassification", f"{family}Config", 0, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("_token", "_tokens", "position_embeddings")
            ):  # zeros, in which a LayerNorm has no finite slope
                parameter.copy_(0.02 * _noise(*parameter.shape))
    return replace(vit(image_height=side, image_width=side), model=model)


def _noise(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _by_hand(make: Callable[[], nn.Module]) -> nn.Module:
    """The module with seeded random weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().train()


def _segformer() -> Example:
    settings = {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "decoder_hidden_size": 32,
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "num_labels": 4,
        **EAGER,
    }
    model = transformers_model("SegformerForSemanticSegmentation", "SegformerConfig", 0, settings)
    labels = torch.randint(4, (ROWS, 16, 16), generator=torch.Generator().manual_seed(2))
    return Example(model, {"pixel_values": _noise(ROWS, 3, 16, 16), "labels": labels})


def _whisper() -> Example:
    settings = {
        **SEQ2SEQ_SIZES,
        "num_mel_bins": 8,
        "max_source_positions": SEQ_LEN,
        "max_target_positions": SEQ_LEN,
    }
    model = transformers_model("WhisperForConditionalGeneration", "WhisperConfig", 0, settings)
    _, labels = tokens_and_labels(0, ROWS, 8, VOCAB_SIZE)
    return Example(model, {"input_features": _noise(ROWS, 8, 2 * SEQ_LEN), "labels": labels})


def _wav2vec2() -> Example:
    settings = {
        **TEXT_SIZES,
        "conv_dim": [16, 16],
        "conv_stride": [4, 2],
        "conv_kernel": [8, 4],
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
        "hidden_dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.0,
        "pad_token_id": 0,
        "ctc_loss_reduction": "mean",
    }
    model = transformers_model("Wav2Vec2ForCTC", "Wav2Vec2Config", 0, settings)
    labels = torch.randint(1, VOCAB_SIZE, (ROWS, 4), generator=torch.Generator().manual_seed(2))
    return Example(model, {"input_values": _noise(ROWS, 256), "labels": labels})


def _matching(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy both ways: logits [B, B] of all pairs of a batch, target int64 [B], row r's other half."""
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def _image_matching(output: Any, target: Tensor) -> Tensor:
    return _matching(output.logits_per_image, target)


def _sigmoid_matching(output: Any, target: Tensor) -> Tensor:
    """SigLIP's: each pair of the batch is a binary question. target: int64 [B], the text of every image."""
    logits: Tensor = output.logits_per_image
    signs = 2.0 * F.one_hot(target, logits.shape[1]) - 1.0
    return -F.logsigmoid(signs * logits).sum(dim=-1).mean()


def _image_text(family: str, loss_fn: Callable[..., Tensor]) -> Example:
    settings = {"text_config": dict(TEXT_SIZES), "vision_config": dict(IMAGE_SIZES), "projection_dim": WIDTH}
    model = transformers_model(f"{family}Model", f"{family}Config", 0, settings)
    tokens, _ = tokens_and_labels(0, ROWS, SEQ_LEN, VOCAB_SIZE - 1)
    tokens[:, -1] = VOCAB_SIZE - 1  # the end token, at which the text is pooled
    inputs = {"input_ids": tokens, "pixel_values": _noise(ROWS, 3, 16, 16), "target": torch.arange(ROWS)}
    return Example(model, inputs, loss_fn)


def _llava() -> Example:
    import transformers

    image_token, num_patches = VOCAB_SIZE - 1, 16
    settings = {
        "vision_config": transformers.CLIPVisionConfig(**IMAGE_SIZES),
        "text_config": transformers.LlamaConfig(**{**TEXT_SIZES, "max_position_embeddings": 32, "use_cache": False}),
        "image_token_index": image_token,
        "vision_feature_layer": -1,
    }
    model = transformers_model("LlavaForConditionalGeneration", "LlavaConfig", 0, settings)
    tokens, labels = tokens_and_labels(0, ROWS, num_patches + SEQ_LEN, image_token)
    tokens[:, :num_patches] = image_token
    labels[:, :num_patches] = -100
    return Example(model, {"input_ids": tokens, "pixel_values": _noise(ROWS, 3, 16, 16), "labels": labels})


def _with_images(family: str, num_patches: int, settings: Mapping[str, Any], marks_images: bool = False) -> Example:
    """Features of one image in front of each row's words."""
    import transformers

    image_token = VOCAB_SIZE - 1
    vision = getattr(transformers, settings["vision"])(**{**IMAGE_SIZES, **settings.get("of_vision", {})})
    text = {**TEXT_SIZES, "max_position_embeddings": 32, "use_cache": False, **settings.get("of_text", {})}
    whole = {"vision_config": vision, "text_config": getattr(transformers, settings["text"])(**text)}
    whole |= {name: image_token for name in ("image_token_id", "image_token_index")} | settings.get("whole", {})
    model = transformers_model(f"{family}ForConditionalGeneration", f"{family}Config", 0, whole)
    tokens, labels = tokens_and_labels(0, ROWS, num_patches + SEQ_LEN, image_token)
    tokens[:, :num_patches], labels[:, :num_patches] = image_token, -100
    marks = {"token_type_ids": (tokens == image_token).long()} if marks_images else {}
    return Example(model, {"input_ids": tokens, "pixel_values": _noise(ROWS, 3, 16, 16), **marks, "labels": labels})


def _paligemma() -> Example:
    heads = {"head_dim": 8, "num_key_value_heads": 2}
    settings = {"vision": "SiglipVisionConfig", "text": "GemmaConfig", "of_text": heads}
    whole = {"projection_dim": WIDTH, "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE}
    return _with_images("PaliGemma", 16, {**settings, "whole": whole}, marks_images=True)


def _gemma3_vision() -> Example:
    settings = {"vision": "SiglipVisionConfig", "text": "Gemma3TextConfig"}
    whole = {"mm_tokens_per_image": 4, "boi_token_index": VOCAB_SIZE - 2, "eoi_token_index": VOCAB_SIZE - 3}
    of_text = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    return _with_images("Gemma3", 4, {**settings, "whole": whole, "of_text": of_text}, marks_images=True)


def _internvl() -> Example:
    sides = {"image_size": [16, 16], "patch_size": [4, 4]}
    heads = {"num_key_value_heads": 2}
    settings = {"vision": "InternVLVisionConfig", "text": "Qwen2Config", "of_vision": sides, "of_text": heads}
    return _with_images("InternVL", 4, settings)


def _unet() -> Example:
    labels = torch.randint(4, (ROWS, 16, 16), generator=torch.Generator().manual_seed(2))
    return Example(_by_hand(UNet), {"pixels": _noise(ROWS, 3, 16, 16), "target": labels}, F.cross_entropy)


def _lstm() -> Example:
    tokens, labels = tokens_and_labels(0, ROWS, SEQ_LEN, VOCAB_SIZE)
    loss_fn = EXAMPLES["transformer_encoder"]().loss_fn
    return Example(_by_hand(LSTMLanguageModel), {"tokens": tokens, "target": labels}, loss_fn)


def _lora() -> Example:
    example = llama()
    return replace(example, model=_by_hand(lambda: with_lora(example.model)))


def _dlrm() -> Example:
    sparse = torch.randint(64, (ROWS, 3, 4), generator=torch.Generator().manual_seed(2))
    clicks = (_noise(ROWS, seed=3) > 0).float()
    inputs = {"dense": _noise(ROWS, 8), "sparse": sparse, "target": clicks}
    return Example(_by_hand(DLRM), inputs, F.binary_cross_entropy_with_logits)


def _two_tower() -> Example:
    inputs = {"left": _noise(ROWS, 16), "right": _noise(ROWS, 24, seed=2), "target": torch.arange(ROWS)}
    return Example(_by_hand(TwoTower), inputs, _matching)


def _switch() -> Example:
    labels = torch.randint(8, (ROWS,), generator=torch.Generator().manual_seed(2))
    return Example(_by_hand(SwitchMLP), {"features": _noise(ROWS, 16), "target": labels}, F.cross_entropy)


def _dit() -> Example:
    times = torch.linspace(0.1, 1.0, ROWS)
    inputs = {"pixels": _noise(ROWS, 3, 16, 16), "times": times, "target": _noise(ROWS, 3, 16, 16, seed=2)}
    return Example(_by_hand(DiT), inputs, F.mse_loss)


def _conformer() -> Example:
    labels = torch.randint(12, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    loss_fn = EXAMPLES["transformer_encoder"]().loss_fn
    return Example(_by_hand(Conformer), {"frames": _noise(ROWS, 8, 2 * SEQ_LEN), "target": labels}, loss_fn)


def _mixer() -> Example:
    labels = torch.randint(12, (ROWS,), generator=torch.Generator().manual_seed(2))
    return Example(_by_hand(Mixer), {"pixels": _noise(ROWS, 3, 16, 16), "target": labels}, F.cross_entropy)


def _graph_network() -> Example:
    generator = torch.Generator().manual_seed(2)
    edges, labels = (
        torch.randint(10, (ROWS, 2, 24), generator=generator),
        torch.randint(6, (ROWS,), generator=generator),
    )
    return Example(
        _by_hand(GraphNetwork), {"nodes": _noise(ROWS, 10, 8), "edges": edges, "target": labels}, F.cross_entropy
    )


def _weighted(losses: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the squared error of the output, plus the autoencoder's other losses. target: float [B, F]."""
    return F.mse_loss(losses["made"], target) + 0.1 * losses["prior"] + 0.01 * losses["fooled"]


def _autoencoder() -> Example:
    features = _noise(ROWS, 16)
    inputs = {"features": features, "noise": _noise(ROWS, 8, seed=2), "target": features}
    return Example(_by_hand(Autoencoder), inputs, _weighted)


def _triplet(vectors: tuple[Tensor, Tensor, Tensor], margin: Tensor) -> Tensor:
    """Return the mean triplet loss, with a margin per row, float [B]."""
    anchor, positive, negative = vectors
    return (margin + (anchor - positive).norm(dim=-1) - (anchor - negative).norm(dim=-1)).relu().mean()


def _siamese() -> Example:
    names = ("anchor", "positive", "negative")
    inputs = {name: _noise(ROWS, 32, seed=seed) for seed, name in enumerate(names)}
    return Example(_by_hand(Siamese), {**inputs, "margin": torch.full((ROWS,), 2.0)}, _triplet)


def _rows(
    family: str,
    build: Callable[..., Example],
    table: Table,
    axes: tuple[str, ...] = (),
) -> dict[str, Entry]:
    return {name: Entry(family, partial(build, *arguments), axes) for name, arguments in table.items()}


_OTHERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mixtral": ("experts", ("ep", "cp")),
    "bert": ("encoder", ()),
    "t5": ("encoder-decoder", ()),
    "vit": ("vision", ()),
    "mlp": ("by hand", ()),
}


def _example(name: str) -> Entry:
    family, axes = _OTHERS.get(name, ("decoder", ("cp",)))
    return Entry(family, EXAMPLES[name], axes)


ZOO: Mapping[str, Entry] = {
    **{name: _example(name) for name in EXAMPLES},
    **_rows("decoder", _causal, CAUSAL, ("cp",)),
    **_rows("experts", _causal, EXPERTS, ("ep", "cp")),
    **_rows("state space", _causal, STATE_SPACE, ("cp",)),
    **_rows("encoder", _masked, MASKED),
    **_rows("encoder-decoder", _seq2seq, SEQ2SEQ),
    **_rows("vision", _image, IMAGES),
    "segformer": Entry("vision", _segformer),
    "unet": Entry("vision", _unet),
    "whisper": Entry("audio", _whisper),
    "wav2vec2": Entry("audio", _wav2vec2),
    "clip": Entry("image and text", partial(_image_text, "CLIP", _image_matching)),
    "siglip": Entry("image and text", partial(_image_text, "Siglip", _sigmoid_matching)),
    "llava": Entry("image and text", _llava),
    "paligemma": Entry("image and text", _paligemma),
    "gemma3_vision": Entry("image and text", _gemma3_vision),
    "internvl": Entry("image and text", _internvl),
    "lstm": Entry("by hand", _lstm),
    "lora": Entry("by hand", _lora, ("cp",)),
    "dlrm": Entry("by hand", _dlrm),
    "two_tower": Entry("by hand", _two_tower),
    "dit": Entry("by hand", _dit),
    "conformer": Entry("by hand", _conformer),
    "mixer": Entry("by hand", _mixer),
    "graph_network": Entry("by hand", _graph_network),
    "autoencoder": Entry("by hand", _autoencoder),
    "siamese": Entry("by hand", _siamese),
    "switch": Entry("by hand", _switch, ("ep",)),
}
