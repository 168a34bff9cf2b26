"""Data sets that are drawn, nobody's: patients' scans, ECGs, short notes, LEAF's synthetic federation."""

# They add their data sets, in the order in which these are listed.
from fedaudit_lab.drawn import leaf, notes, phantoms, ecg  # noqa: F401, I001
