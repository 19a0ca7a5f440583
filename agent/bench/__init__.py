"""Measuring speed and bytes: what is timed, beside what, and how it is told."""
