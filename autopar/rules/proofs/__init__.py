"""Proofs of rules: every option of a call, run on real tensors by simulated ranks."""
