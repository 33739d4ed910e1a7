"""The errors that products of float32 operands may have, by precision."""

import pytest

# Relative to each product. Operands have 11 bits, or 23 bits without the products of low parts.
PRODUCT_ERROR = {"default": 2.0**-10, "highest": 2.0**-21}

PRECISIONS = pytest.mark.parametrize("precision", PRODUCT_ERROR)
