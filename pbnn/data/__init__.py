"""Tables in: read, check, split, standardise by training rows, and back to the user's units.

No file of this package imports torch, and pandas and scikit-learn wait until they are needed.
"""

from pbnn.data.dataset import Dataset, guess_target_kind, prepare, read_features, split_rows
from pbnn.data.preprocessor import Preprocessor
from pbnn.data.rows import Rows
from pbnn.data.tables import SHIPPED, Table, read_table
from pbnn.data.targets import TargetKind
from pbnn.data.units import Units

__all__ = [
    "SHIPPED",
    "Dataset",
    "Preprocessor",
    "Rows",
    "Table",
    "TargetKind",
    "Units",
    "guess_target_kind",
    "prepare",
    "read_features",
    "read_table",
    "split_rows",
]
