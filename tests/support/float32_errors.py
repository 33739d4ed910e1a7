"""The errors that products of float32 operands may have, by precision."""

import pytest

# Relative to each product. "default" rounds operands to 11 bits. "highest" keeps 23 bits, but
# leaves out the products of two low parts.
PRODUCT_ERROR = {"default": 2.0**-10, "highest": 2.0**-21}

PRECISIONS = pytest.mark.parametrize("precision", PRODUCT_ERROR)
