"""Local model reconstruction: from one client's messages to the model that it would have trained alone."""
