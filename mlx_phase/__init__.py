"""Metal kernels for prefill and decode in stock mlx-lm models."""

from .executor import metal_kernel
from .patch import patch, patched, unpatch

__all__ = ["__version__", "metal_kernel", "patch", "patched", "unpatch"]
__version__ = "0.1.0"
