"""Which labels an update was made from."""

from fedaudit.attacks.labels import counts as counts
