"""A Flower app on handwritten digits."""
