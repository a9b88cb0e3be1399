"""Influence functions: which training data made a model predict what it does?"""

from kfs.influence.cost import Cost
from kfs.influence.index import Index
from kfs.influence.influence import Influence
from kfs.influence.query_error import QueryError
from kfs.influence.ranking import Ranked, Top

__all__ = ["Cost", "Index", "Influence", "QueryError", "Ranked", "Top"]
