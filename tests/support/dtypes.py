"""Short names of the dtypes that tests use most."""

import jax.numpy as jnp
import numpy as np

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
F64, C64, C128 = np.float64, np.complex64, np.complex128
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
