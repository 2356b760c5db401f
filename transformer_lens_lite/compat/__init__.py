"""Classic names in their classic places: `transformer_lens.X` and `transformer_lens_lite.X`.

The only part of the library that knows how TransformerLens lays out its modules. `names` is the
table, `modules` makes modules of it, `aliasing` puts them under the name `transformer_lens`.
"""

from transformer_lens_lite.compat.aliasing import install_as_transformer_lens, uninstall

__all__ = ["install_as_transformer_lens", "uninstall"]
