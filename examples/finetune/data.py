"""The data and arguments of both scripts: text that every machine has, in windows of bytes."""

import argparse
import sysconfig
from pathlib import Path

import torch


def arguments():
    """The command line: FOLDER, --steps, --length, --cluster, --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a causal language model whose vocabulary has at least 256 tokens")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=64, help="tokens of a window")
    parser.add_argument("--cluster", default="4 cpu", help="of parallel.py, such as '8 h100-sxm'")
    parser.add_argument("--out", default="tuned")
    return parser.parse_args()


def windows_of_text(length):
    """(training, held out) windows of the source of Python's own library: input_ids and labels, int64 [length]."""
    home = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((home / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py", "pathlib.py"))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // length * length]
    samples = [{"input_ids": window, "labels": window} for window in windows.view(-1, length)]
    return samples[32:], samples[:32]
