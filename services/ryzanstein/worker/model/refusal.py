"""Why a model cannot be served by these ranks, whatever is retried. Free of torch, so that the agent can name it too."""

from __future__ import annotations


class ModelRefused(Exception):
    """Raised before anything large is allocated; the message names the tensor and file, or the numbers, that do not fit."""


class CheckpointError(ModelRefused):
    """The directory is no checkpoint that can be served: the message names the file and, where there is one, the tensor."""


class UnevenSplit(ModelRefused):
    """A dimension of the model does not divide over the ranks; the message has both numbers."""
