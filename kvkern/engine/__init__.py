"""Continuous batching over the cache objects: ``Engine`` and what goes in and out of it."""

from kvkern.engine.engine import Completion, Engine, EngineStats, FinishReason, TokenEvent
from kvkern.engine.model import StepModel, Tokenizer
from kvkern.engine.sampling import SamplingParams

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "SamplingParams",
    "StepModel",
    "TokenEvent",
    "Tokenizer",
]
