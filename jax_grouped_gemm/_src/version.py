"""The version of the package, alone, for the build to read."""

__version__ = "0.2.0"
