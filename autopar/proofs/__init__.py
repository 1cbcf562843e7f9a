"""Prove sharding rules on simulated ranks: every option as the emitted program runs it, against the whole call."""

from autopar.proofs.rule_proof import ProofReport, prove_rule

__all__ = ["ProofReport", "prove_rule"]
