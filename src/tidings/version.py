"""The version of this release; `pyproject.toml` says the same, and a test holds it so."""

__version__ = "0.2.0"
