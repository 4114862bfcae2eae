"""The kernel seam: providers, their choice, weights, and the view of a step that a model sees."""
