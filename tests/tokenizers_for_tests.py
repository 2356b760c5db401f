"""Small tokenizers made on the spot: the kinds that differ in BOS, spaces and padding.

Each function returns a fresh transformers tokenizer; the training behind it happens once.
"""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

END = "<|endoftext|>"
CORPUS = [
    "Hello world, hello there. The cat sat on the mat and the dog looked at the cat.",
    "Once upon a time there was a little girl who lived in a house by the sea.",
    "When Mary and John went to the store, John gave a drink to Mary. Paris is in France.",
] * 4


@cache
def _byte_level_json() -> str:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def byte_level(end_of_text: bool = True, **special: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2; by default with "<|endoftext|>", last in the vocabulary.

    `special` names special tokens: none of them by default, as in some checkpoints.
    """
    backend = Tokenizer.from_str(_byte_level_json())
    if end_of_text:
        backend.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def gpt2_like() -> PreTrainedTokenizerFast:
    """BOS = EOS = "<|endoftext|>" and no pad token; never adds BOS by itself."""
    return byte_level(bos_token=END, eos_token=END, unk_token=END)


def with_own_pad() -> PreTrainedTokenizerFast:
    """Byte-level, with three different tokens for BOS, EOS and pad."""
    return byte_level(bos_token="<bos>", eos_token=END, pad_token="<pad>")


def llama3_like() -> PreTrainedTokenizerFast:
    """Byte-level, and a sequence of post-processors of which the second adds BOS."""
    backend = Tokenizer.from_str(_byte_level_json())
    backend.add_special_tokens(["<|begin_of_text|>", END])
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
        special_tokens=[("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))],
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    names: dict[str, Any] = {"bos_token": "<|begin_of_text|>", "eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@cache
def _metaspace_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: <unk>, <s>, </s>, the 256 bytes, then what was learned."""
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS, BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(learner.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    return {piece: i for i, piece in enumerate(pieces)}, [tuple(m) for m in model["merges"]]


def llama_like(
    auto_bos: bool = True, auto_eos: bool = False, named: bool = True
) -> PreTrainedTokenizerFast:
    """Metaspace BPE with byte fallback as in Llama 2: a text gets a space in front.

    `auto_bos`: the post-processor adds BOS. `named=False`: nothing says which token BOS is.
    """
    vocab, merges = _metaspace_model()
    model = BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    front, back = "<s> " * auto_bos, " </s>" * auto_eos
    backend.post_processor = processors.TemplateProcessing(
        single=f"{front}$A{back}",
        pair=f"{front}$A{back} {front}$B:1{back}",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    names: dict[str, Any] = {"bos_token": "<s>"} if named else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", **names
    )


class CharTokenizer(PreTrainedTokenizer):
    """One token per character, in Python: no fast backend and no post-processor.

    Adds BOS either in the way transformers 5 knows about, or in its own way (`stubborn`).
    """

    LETTERS = "abcdefgh .,?"

    def __init__(self, stubborn: bool = False, **kwargs: Any) -> None:
        self.stubborn = stubborn
        kwargs = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "?"} | kwargs
        super().__init__(special_tokens_pattern="none" if stubborn else "bos", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.LETTERS)

    def get_vocab(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self.LETTERS)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.LETTERS.index(token if token in self.LETTERS else "?")

    def _convert_id_to_token(self, index: int) -> str:
        return self.LETTERS[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        if self.stubborn:
            return [self.bos_token_id, *token_ids_0]
        return super().build_inputs_with_special_tokens(token_ids_0, token_ids_1)
