"""Data sets that are drawn, nobody's: patients' scans, ECGs, short notes, LEAF's federation; and portraits."""

# They add their data sets, in the order in which these are listed.
from fedaudit_lab.drawn import leaf, notes, phantoms, ecg, portraits  # noqa: F401, I001
