"""Attacks on text: which words occurred, and exact sequences from the span of attention's gradients."""
