"""How the step of an optimisation attack is computed: the distance of updates, and its gradient on the images."""
