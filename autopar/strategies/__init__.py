"""Predictions of strategies that a person wrote, under the profile of a training framework."""

from autopar.strategies.prediction import StrategyPrediction, WhatIf
from autopar.strategies.predictor import Predictor, predict
from autopar.strategies.timeline import StepEvent

__all__ = ["Predictor", "StepEvent", "StrategyPrediction", "WhatIf", "predict"]
