"""The ceiling: how much of an example an update determines, whoever attacks. Only who has the truth can tell.

The best estimate of a batch X from an update F(X) + noise, near the truth and with a Gaussian prior, has the mean
squared error tr[(C⁻¹ + JᵀΣ⁻¹J)⁻¹]/D: J is the derivative of F at the truth, C the prior's covariance, Σ the noise's.
"""
