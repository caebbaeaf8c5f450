"""Tidings: a durable message mesh for AI agents."""

from tidings.errors import TidingsError

__version__ = "0.1.0"
__all__ = ["TidingsError", "__version__"]
