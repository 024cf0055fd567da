"""Generative noisy-label learning: train classifiers that survive wrong labels."""

from fastgnl.estimator import GNLClassifier
from fastgnl.objective import GNLObjective
from fastgnl.pair import GNLPair
from fastgnl.terms import Terms
from fastgnl.transition import with_transition

__all__ = ["GNLClassifier", "GNLObjective", "GNLPair", "Terms", "with_transition"]
__version__ = "0.1.0"
