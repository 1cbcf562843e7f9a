"""Predictions of strategies that a person wrote, under the profile of a training framework."""

from autopar.simulate.prediction import StrategyPrediction, WhatIf
from autopar.simulate.predictor import Predictor, predict
from autopar.simulate.timeline import StepEvent

__all__ = ["Predictor", "StepEvent", "StrategyPrediction", "WhatIf", "predict"]
