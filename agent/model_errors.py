"""What can go wrong between a model's name and its weights in memory.

`cache.support.UnsupportedModel` is the one more that a caller meets: the cache cannot serve it.
"""

from __future__ import annotations


class ModelError(Exception):
    """Any of the below: a message for the person who named the model."""


class UnknownModel(ModelError, ValueError):
    """The name is none of the catalogue's, and neither a hub id, a folder nor a file."""


class BadModelFile(ModelError, ValueError):
    """A file or folder does not hold a model that can be loaded."""


class CannotQuantize(ModelError, ValueError):
    """Weights of the form asked for cannot be loaded here: a package or a device is missing."""


class FetchError(ModelError, RuntimeError):
    """A model could not be brought here. What was fetched is kept for the next try."""


class WrongSum(FetchError):
    """What arrived is not the file the catalogue means. Nothing of it was kept."""


class FullDisk(FetchError):
    """There is not enough room for the model."""
