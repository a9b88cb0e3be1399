"""Influence functions: which training data made a model predict what it does?"""

from kfs.influence.cost import Cost, QueryError
from kfs.influence.index import Index
from kfs.influence.influence import Influence
from kfs.influence.scoring import Ranked, Top

__all__ = ["Cost", "Index", "Influence", "QueryError", "Ranked", "Top"]
