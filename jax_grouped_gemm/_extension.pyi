"""The compiled part of the package: XLA FFI handlers and the kernels behind them."""

def registrations() -> dict[str, object]:
    """The FFI handlers as capsules, by the name of their custom call target."""

def ffi_api_version() -> tuple[int, int]:
    """Major and minor version of the XLA FFI headers that the handlers were built with."""
