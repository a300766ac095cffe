"""Metal kernels for prefill and decode in stock mlx-lm models."""

from .exact import exact_rows
from .executor import metal_kernel, profile_kernel
from .patch import patch, unpatch
from .patch_scope import patched

__all__ = [
    "__version__",
    "exact_rows",
    "metal_kernel",
    "patch",
    "patched",
    "profile_kernel",
    "unpatch",
]
__version__ = "0.1.0"
