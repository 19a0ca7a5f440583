"""Sandboxes in which a model's commands run. Knows nothing of models or tasks."""
