"""The ceiling: how much of its examples an update determines, whoever attacks. Only who has the truth can tell.

The best estimate of a batch X from an update F(X) + noise, near the truth and with a Gaussian prior, has the mean
squared error tr[(C⁻¹ + JᵀΣ⁻¹J)⁻¹]/D: J is the derivative of F at the truth, C the prior's covariance, Σ the noise's.
It is an estimate, no bound: far from the truth other batches may give the same update (which flatters the attacker),
and a better prior than a Gaussian may beat it (which flatters the defender).
"""

from fedaudit.ceiling.estimate import Ceiling as Ceiling
from fedaudit.ceiling.estimate import ceiling_of as ceiling_of
from fedaudit.ceiling.estimate import products as products
from fedaudit.ceiling.message import Message as Message
from fedaudit.ceiling.message import message_of as message_of
from fedaudit.ceiling.message import names_of as names_of
from fedaudit.modalities.prior import Prior as Prior
from fedaudit.modalities.prior import prior_of as prior_of
