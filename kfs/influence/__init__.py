"""Influence functions: scores for how much each training example contributes to a prediction of the model."""

from kfs.influence.cost import Cost, QueryError
from kfs.influence.index import Index
from kfs.influence.influence import Influence
from kfs.influence.scoring import Ranked, Top

__all__ = ["Cost", "Index", "Influence", "QueryError", "Ranked", "Top"]
