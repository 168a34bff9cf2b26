"""A Flower app on handwritten digits; `fedaudit audit --flower` on it takes a minute or two on two cores."""
