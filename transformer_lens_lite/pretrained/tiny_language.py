"""The synthetic language that `tiny-lens` is trained on.

Templated, English-like sentences about a small fixed world: who likes what, who lives where,
which city is the capital of which country, counting, days, and indirect objects ("When Mary and
John went to the store, John gave a drink to Mary."). One in five pairs of names never shares a
sentence in training; these held-out pairs test that the model has learned the rule rather than
the pairs.

Every word is two tokens, as in GPT-2: "Mary" opens a text and " Mary" follows a space. Only the
standard library is needed here.
"""

import random
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

END_OF_TEXT, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<|unk|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, UNKNOWN)
PUNCTUATION = (".", ",")


def word_list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = word_list(
    "Mary John Anna Tom Alice Bob Emma James Lucy Mark Sarah Paul Kate David Laura Peter Julia "
    "Simon Clara Henry Nina Oscar Rosa Felix Ella Adam Ruth Max Ivy Leo Maria Jack Sofia Luke "
    "Eva Ben Grace Sam Helen Daniel"
)
PLACES = word_list(
    "store park school beach market station garden library office museum river kitchen"
)
OBJECTS = word_list("drink book ring ball letter flower basket hat key box picture coat lamp map")
FOODS = word_list("tea coffee milk bread cheese rice soup fish cake honey fruit chocolate")
COLORS = word_list("red blue green yellow black white brown")
FEELINGS = word_list("happy sad tired hungry late busy")
NUMBERS = word_list("one two three four five six seven eight nine ten eleven twelve")
DAYS = word_list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo",
    "Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Portugal": "Lisbon", "Ireland": "Dublin",
    "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Hungary": "Budapest", "Denmark": "Copenhagen", "Chile": "Santiago", "Turkey": "Ankara",
}  # fmt: skip
COUNTRIES = tuple(CAPITALS)

# Arbitrary but fixed: the strides share no factor with the lengths, so every entry is used.
LIKES = {name: FOODS[7 * i % len(FOODS)] for i, name in enumerate(NAMES)}
HOMES = {name: COUNTRIES[5 * i % len(COUNTRIES)] for i, name in enumerate(NAMES)}

OPENINGS = (
    "When {a} and {b} went to the {place},",
    "After {a} and {b} got to the {place},",
    "While {a} and {b} were at the {place},",
    "Then {a} and {b} walked to the {place}, and",
    "Today {a} and {b} had lunch at the {place}, and",
    "When {a} met {b} at the {place},",
    "After {a} saw {b} near the {place},",
    "{a} and {b} found a {thing} at the {place}, and",
    "{a} and {b} went to the {place}.",
    "{a} sat with {b} in the {place}, and then",
)
GIVINGS = (
    "{s} gave a {object} to",
    "{s} handed the {object} to",
    "{s} passed the {color} {object} to",
    "{s} showed a {color} {object} to",
    "{s} sold the {object} to",
    "{s} brought some {food} to",
    "{s} decided to give the {object} to",
)
SCENES = (
    "{a} and {b} went to the {place}.",
    "{a} saw a {color} {object} near the {place}.",
    "The {color} {object} is in the {place}.",
    "The {object} in the {place} is {color}.",
    "{a} was {feeling}, so {a} went to the {place}.",
    "{a} has {number} {color} hats.",
    "{a} lost a {object}, and {b} found the {object}.",
    "On {day} {a} met {b} at the {place}.",
    "{a} was {feeling} and {b} was {feeling}.",
)
CAPITAL_FACT = "The capital of {country} is {capital}."
LIKES_FACT = "{name} likes {food}."
HOME_FACT = "{name} lives in {capital}."
FACTS = (
    CAPITAL_FACT,
    "{capital} is the capital of {country}.",
    LIKES_FACT,
    HOME_FACT,
    "{name} lives in {capital}, the capital of {country}.",
)
COUNTING = "Count from {first} to {last}"
NEXT_DAY = "If today is {day}, then tomorrow is {tomorrow}."

WORD_LISTS = (
    NAMES, PLACES, OBJECTS, FOODS, COLORS, FEELINGS, NUMBERS, DAYS, COUNTRIES,
    tuple(CAPITALS.values()),
)  # fmt: skip
TEMPLATES = (*OPENINGS, *GIVINGS, *SCENES, *FACTS, COUNTING, NEXT_DAY)


class IndirectObject(NamedTuple):
    """A prompt that ends just before the indirect object; `io` and `subject` are tokens."""

    prompt: str
    io: str
    subject: str
    order: str  # ABBA: the indirect object is named first; BABA: the subject is


class Fact(NamedTuple):
    """A prompt and the token that completes it."""

    prompt: str
    answer: str


def words() -> tuple[str, ...]:
    """Every word of the language, capitalised forms apart, without punctuation."""
    fixed = re.findall(r"\w+", re.sub(r"\{\w+\}", "", " ".join(TEMPLATES)))
    listed = [word for words in WORD_LISTS for word in words]
    return tuple(dict.fromkeys([*listed, *fixed]))


def vocabulary() -> tuple[str, ...]:
    """All tokens in the order of their ids: first the words after a space, then the openers."""
    spaced = [f" {word}" for word in words()]
    return (*SPECIAL_TOKENS, *PUNCTUATION, *spaced, *words())


def is_held_out(a: str, b: str) -> bool:
    """Whether this pair of names, in either order, is kept out of training sentences."""
    return (NAMES.index(a) + NAMES.index(b)) % 5 == 0


def name_pairs(held_out: bool) -> list[tuple[str, str]]:
    return [pair for pair in combinations(NAMES, 2) if is_held_out(*pair) == held_out]


TRAINING_PAIRS = name_pairs(held_out=False)


def training_pair(rng: random.Random) -> list[str]:
    """Two names that may share a training sentence, in random order."""
    return rng.sample(rng.choice(TRAINING_PAIRS), 2)


def fill(template: str, rng: random.Random, **names: str) -> str:
    """Put the given names, and random words for everything else, into a template."""
    return template.format(
        place=rng.choice(PLACES),
        object=rng.choice(OBJECTS),
        thing=rng.choice(OBJECTS),
        food=rng.choice(FOODS),
        color=rng.choice(COLORS),
        feeling=rng.choice(FEELINGS),
        number=rng.choice(NUMBERS),
        day=rng.choice(DAYS),
        **names,
    )


def indirect_object(rng: random.Random, io: str, subject: str, order: str) -> IndirectObject:
    a, b = (io, subject) if order == "ABBA" else (subject, io)
    template = f"{rng.choice(OPENINGS)} {rng.choice(GIVINGS)}"
    prompt = fill(template, rng, a=a, b=b, s=subject)
    return IndirectObject(prompt, f" {io}", f" {subject}", order)


def indirect_object_sentences(
    n: int, seed: int, held_out: bool = True, order: str | None = None
) -> list[IndirectObject]:
    """`n` prompts with their answers; in both orders in turn unless one is asked for."""
    rng = random.Random(seed)
    pairs = name_pairs(held_out)
    orders = [order] if order else ["ABBA", "BABA"]
    examples = []
    for i in range(n):
        io, subject = rng.sample(rng.choice(pairs), 2)
        examples.append(indirect_object(rng, io, subject, orders[i % len(orders)]))
    return examples


def indirect_object_sentence(rng: random.Random) -> str:
    io, subject = training_pair(rng)
    example = indirect_object(rng, io, subject, rng.choice(["ABBA", "BABA"]))
    return f"{example.prompt}{example.io}."


def third_person_sentence(rng: random.Random) -> str:
    """Like an indirect-object sentence, but a third person gives, so either name may receive.

    These keep such prompts, the usual corrupted input of patching, familiar to the model.
    """
    a, b = training_pair(rng)
    others = [c for c in NAMES if c not in (a, b) and not (is_held_out(a, c) or is_held_out(b, c))]
    template = f"{rng.choice(OPENINGS)} {rng.choice(GIVINGS)} {rng.choice([a, b])}."
    return fill(template, rng, a=a, b=b, s=rng.choice(others))


def scene(rng: random.Random) -> str:
    a, b = training_pair(rng)
    return fill(rng.choice(SCENES), rng, a=a, b=b)


def state(template: str, name: str, country: str) -> str:
    return template.format(name=name, food=LIKES[name], country=country, capital=CAPITALS[country])


def fact_sentence(rng: random.Random) -> str:
    template, name = rng.choice(FACTS), rng.choice(NAMES)
    country = HOMES[name] if "{name}" in template else rng.choice(COUNTRIES)
    return state(template, name, country)


def counting_sentence(rng: random.Random) -> str:
    first, last = sorted(rng.sample(range(len(NUMBERS)), 2))
    numbers = NUMBERS[first : last + 1]
    return f"{COUNTING.format(first=numbers[0], last=numbers[-1])}, {', '.join(numbers)}."


def next_day_sentence(rng: random.Random) -> str:
    day = rng.randrange(7)
    return NEXT_DAY.format(day=DAYS[day], tomorrow=DAYS[(day + 1) % 7])


KINDS: dict[Callable[[random.Random], str], float] = {
    indirect_object_sentence: 0.35,
    third_person_sentence: 0.05,
    scene: 0.2,
    fact_sentence: 0.3,
    counting_sentence: 0.05,
    next_day_sentence: 0.05,
}


def sentence(rng: random.Random) -> str:
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    return kind(rng)


def sentences(seed: int) -> Iterator[str]:
    """Training sentences without end; no held-out pair of names is ever among them."""
    rng = random.Random(seed)
    while True:
        yield sentence(rng)


def document(rng: random.Random, n_sentences: int) -> str:
    return " ".join(sentence(rng) for _ in range(n_sentences))


def repeated_sequences(n: int, length: int, seed: int) -> list[str]:
    """`n` texts of `length` different random words said twice.

    The words are drawn without return, so each has one successor. Only the very first token is
    not repeated exactly: it opens the text, and its repetition follows a space.
    """
    rng = random.Random(seed)
    firsts = [rng.sample(words(), length) for _ in range(n)]
    return [" ".join([*first, *first]) for first in firsts]


def facts() -> list[Fact]:
    """Every capital, every favourite food and every home, as prompts with their answers."""
    capitals = [state(CAPITAL_FACT, NAMES[0], country) for country in COUNTRIES]
    people = [
        state(template, name, HOMES[name]) for template in (LIKES_FACT, HOME_FACT) for name in NAMES
    ]
    splits = [statement.removesuffix(".").rpartition(" ") for statement in [*capitals, *people]]
    return [Fact(prompt, f" {answer}") for prompt, _, answer in splits]
