"""Gradient inversion: recover the training images from one update."""
