"""Models that ship inside the package, each in a folder of Hugging Face files."""
