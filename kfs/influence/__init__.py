"""Influence functions: which training data made a model predict what it does?"""

from kfs.influence.influence import Influence
from kfs.influence.ranking import Ranked, Top

__all__ = ["Influence", "Ranked", "Top"]
