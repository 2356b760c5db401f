"""python -m transformer_lens_lite [MODEL_OR_FOLDER [PROMPT]]: look inside a model.

python -m transformer_lens_lite verify MODEL_OR_FOLDER: compare it with Hugging Face's model.
"""

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


def check(arguments: list[str]) -> int:
    """Print how far the model is from Hugging Face's; 1 when it is too far."""
    from transformer_lens_lite.verification import verify

    parser = argparse.ArgumentParser(
        prog="python -m transformer_lens_lite verify",
        description="Run Hugging Face's model and ours on the same tokens, and compare them.",
    )
    add = parser.add_argument
    add("model", help="a folder or a hub name")
    add("--dtype", default="float32", help="what both run in (%(default)s)")
    add("--tolerance", type=float, help="relative error that counts as equal (default: by dtype)")
    options = parser.parse_args(arguments)
    result = verify(options.model, dtype=options.dtype, tolerance=options.tolerance)
    print(result)
    return 0 if result.passed else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the demo, or `verify`; 1 and one line on stderr when the model cannot be loaded or
    run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["verify"]:
            return check(arguments[1:])
        return look(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def look(arguments: list[str]) -> int:
    """The demo."""
    parser = argparse.ArgumentParser(prog="python -m transformer_lens_lite", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default="tiny-lens", help="a folder or a hub name (%(default)s)")
    add("prompt", nargs="?", help="what to run it on")
    add("--page", type=Path, default=Path("demo.html"), help="where the page goes (%(default)s)")
    add("--no-page", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    show(options.model, options.prompt, None if options.no_page else options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
