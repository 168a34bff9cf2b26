"""Which labels an update was made from."""
