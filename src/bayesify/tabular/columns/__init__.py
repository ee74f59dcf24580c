"""Turn the columns of a table into inputs of the network, and measure what lies outside training.

scikit-learn's encoders are not used: they do not tell how far a value lies outside the training
data, and a run stores its columns as JSON that every version reads.
"""

from bayesify.tabular.columns.categories import (
    FEW_LEVELS,
    MOST_LEVELS,
    CategoryColumn,
    FlagColumn,
)
from bayesify.tabular.columns.column import Column, Features, UnusedColumn
from bayesify.tabular.columns.dates import DateColumn, calendar_parts
from bayesify.tabular.columns.encoded import EncodedColumn, FeatureColumn
from bayesify.tabular.columns.images import ImageColumn
from bayesify.tabular.columns.numbers import NumberColumn, RangedColumn, facts_of
from bayesify.tabular.columns.stored import column_from_json
from bayesify.tabular.columns.texts import TextColumn
from bayesify.tabular.columns.tokens import TokenColumn

__all__ = [
    "FEW_LEVELS",
    "MOST_LEVELS",
    "CategoryColumn",
    "Column",
    "DateColumn",
    "EncodedColumn",
    "FeatureColumn",
    "Features",
    "FlagColumn",
    "ImageColumn",
    "NumberColumn",
    "RangedColumn",
    "TextColumn",
    "TokenColumn",
    "UnusedColumn",
    "calendar_parts",
    "column_from_json",
    "facts_of",
]
