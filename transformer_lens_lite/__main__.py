"""python -m transformer_lens_lite [MODEL_OR_FOLDER [PROMPT]]: look inside a model."""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 and one line on stderr when the model cannot be loaded or run."""
    parser = argparse.ArgumentParser(prog="python -m transformer_lens_lite", description=__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        default="tiny-lens",
        help="the model in the box, a folder, or a name on the hub",
    )
    parser.add_argument("prompt", nargs="?", help="what to run it on")
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("demo.html"),
        metavar="FILE",
        help="where the HTML page goes (default: %(default)s)",
    )
    parser.add_argument("--no-page", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    from transformer_lens_lite.demo import show

    try:
        show(options.model, options.prompt, None if options.no_page else options.page)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
