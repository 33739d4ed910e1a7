"""The version of the package, in its own file so that the build can read it."""

__version__ = "0.2.0"
