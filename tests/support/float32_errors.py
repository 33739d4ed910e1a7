"""The errors that products of float32 operands may have, by precision."""

import pytest

# Relative to each product: 11 bits of each operand, or 23 and no low times low.
PRODUCT_ERROR = {"default": 2.0**-10, "highest": 2.0**-21}

PRECISIONS = pytest.mark.parametrize("precision", PRODUCT_ERROR)
