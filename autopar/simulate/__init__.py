"""Predictions of strategies that a person wrote, under the profile of a training framework."""

from autopar.simulate.predictor import Predictor, predict

__all__ = ["Predictor", "predict"]
