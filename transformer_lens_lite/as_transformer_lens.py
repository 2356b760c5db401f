"""Importing this puts the library under the name `transformer_lens`.

    import transformer_lens_lite.as_transformer_lens
    from transformer_lens import HookedTransformer

See `install_as_transformer_lens`, which it calls; `uninstall()` undoes it.
"""

from transformer_lens_lite.compat import install_as_transformer_lens, uninstall

__all__ = ["install_as_transformer_lens", "uninstall"]

install_as_transformer_lens()
