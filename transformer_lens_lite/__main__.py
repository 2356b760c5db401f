"""python -m transformer_lens_lite [MODEL_OR_FOLDER [PROMPT]]: look inside a model."""

import argparse
import sys
from pathlib import Path

BOXED_PROMPT = "When Mary and John went to the store, John gave a drink to"
PLAIN_PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"


def show(model_name: str, prompt: str | None, page: Path | None) -> None:
    """Load, run, print, and write the page. ValueError for a model without a tokenizer."""
    from transformer_lens_lite.demo import report, run
    from transformer_lens_lite.demo_page import html_page
    from transformer_lens_lite.model import HookedTransformer

    model = HookedTransformer.from_pretrained_no_processing(model_name)
    if model.tokenizer is None:
        raise ValueError(f"{model_name} has no tokenizer, and the demo starts from a text")
    if prompt is None:
        prompt = BOXED_PROMPT if model_name == "tiny-lens" else PLAIN_PROMPT
    demo = run(model, prompt)
    print(report(demo))
    if page is not None:
        page.write_text(html_page(demo), encoding="utf-8")
        print(f"\nThe same as pictures: {page}")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 and one line on stderr when the model cannot be loaded or run."""
    parser = argparse.ArgumentParser(prog="python -m transformer_lens_lite", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default="tiny-lens", help="a folder or a hub name (%(default)s)")
    add("prompt", nargs="?", help="what to run it on")
    add("--page", type=Path, default=Path("demo.html"), help="where the page goes (%(default)s)")
    add("--no-page", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    try:
        show(options.model, options.prompt, None if options.no_page else options.page)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
