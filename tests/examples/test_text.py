"""The corpus is real text, split without overlap, and sample i does not depend on how it was reached."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.text import Corpus, standard_library


def take(corpus: Corpus, count: int, batch_size: int, start: int = 0, seed: int = 0) -> torch.Tensor:
    batches = islice(corpus.batches(batch_size, seq_len=8, seed=seed, start=start), count)
    return torch.cat([batch["input_ids"] for batch in batches])


@pytest.fixture
def corpus() -> Corpus:
    """20 windows of 8 bytes, window w being full of w, and a tail of 5 that belongs to none."""
    return Corpus(np.concatenate([np.repeat(np.arange(20, dtype=np.uint8), 8), np.full(5, 99, dtype=np.uint8)]))


def test_an_epoch_is_every_window_once(corpus: Corpus) -> None:
    first, second = take(corpus, 20, 1), take(corpus, 20, 1, start=20)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(20))
    assert bool((first == first[:, :1]).all())
    assert first.tolist() != second.tolist()
    assert first.tolist() != take(corpus, 20, 1, seed=1).tolist()


def test_samples_do_not_depend_on_the_batch_size_or_on_resuming(corpus: Corpus) -> None:
    one_by_one = take(corpus, 60, 1)
    assert torch.equal(take(corpus, 10, 6), one_by_one)
    assert torch.equal(torch.cat([take(corpus, 7, 6), take(corpus, 3, 6, start=42)]), one_by_one)


def test_batches_are_int64_with_labels_of_their_own(corpus: Corpus) -> None:
    batch = next(corpus.batches(4, 8))
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_text_that_is_too_short_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="165 bytes has no window of 166"):
        next(corpus.batches(1, 166))


def test_standard_library_is_text_in_two_disjoint_splits() -> None:
    train, validation = standard_library("train"), standard_library("validation")
    assert len(train.tokens) > 2_000_000 and len(validation.tokens) > 100_000
    share_ascii = float((train.tokens < 128).mean())
    assert share_ascii > 0.99
    assert train.tokens.tobytes().count(b"\ndef ") > 1000
    assert np.array_equal(train.tokens, standard_library("train").tokens)


def test_files_are_split_and_ordered_by_path(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index:02d}.py").write_text(f"<{index}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("skipped")
    (tmp_path / "notes.txt").write_text("skipped")
    train, validation = (standard_library(split, folder=tmp_path) for split in ("train", "validation"))
    assert validation.tokens.tobytes() == b"<9><19>"
    assert train.tokens.tobytes() == "".join(f"<{i}>" for i in range(20) if i not in (9, 19)).encode()
    assert standard_library("train", max_bytes=5, folder=tmp_path).tokens.tobytes() == b"<0><1"


def test_unknown_split_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'test'"):
        standard_library("test")
    with pytest.raises(FileNotFoundError):
        standard_library(folder=tmp_path)
