"""Training loops of other packages around an autopar program: transformers' Trainer, Accelerate, Lightning.

Each module needs its package, an optional one, so none is imported here.
"""
