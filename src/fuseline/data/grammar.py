"""German sentences and their English translations, generated: numbers, dates, times, prices, everyday
statements.

It is the default where no corpus is available, and a fair test of what a model has learned: the test
sentences contain combinations of numbers and names that training never shows, so that none can be memorized.
The two languages differ in ways that a translator must learn: "dreiundzwanzig" is "twenty-three", "halb vier"
is "half past three", 1.234,50 is 1,234.50, and the order of verbs and dates differs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

# One in this many sentences goes to validation, and as many go to test.
HELD_BACK = 12


def _words(text: str) -> list[str]:
    return text.split()


_UNITS_DE = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn"
)
_UNITS_EN = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS_DE = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_TENS_EN = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_MONTHS_DE = _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember")
_MONTHS_EN = _words("January February March April May June July August September October November December")
_DAYS_DE = _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
_DAYS_EN = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NAMES = _words(
    "Anna Paul Clara Jonas Lena Felix Marie Emil Sophie Oskar Greta Moritz Ida Anton Mia Theo Nora Karl Ella "
    "Hugo Frieda Leon Helene Simon Lotte David Martha Jakob Paula Max"
)
_CITIES = {
    "Berlin": "Berlin", "München": "Munich", "Köln": "Cologne", "Wien": "Vienna", "Hamburg": "Hamburg",
    "Genf": "Geneva", "Nürnberg": "Nuremberg", "Rom": "Rome", "Prag": "Prague", "Leipzig": "Leipzig",
    "Zürich": "Zurich", "Mailand": "Milan", "Warschau": "Warsaw", "Lissabon": "Lisbon", "Bremen": "Bremen",
}  # fmt: skip
# German plural, English plural.
_THINGS = {
    "Bücher": "books", "Äpfel": "apples", "Stühle": "chairs", "Fahrräder": "bicycles", "Hemden": "shirts",
    "Tassen": "cups", "Schlüssel": "keys", "Karten": "tickets", "Blumen": "flowers", "Brötchen": "rolls",
    "Lampen": "lamps", "Uhren": "watches", "Briefe": "letters", "Schuhe": "shoes", "Flaschen": "bottles",
    "Bilder": "pictures", "Eier": "eggs", "Hefte": "notebooks",
}  # fmt: skip
_COLOURS = {
    "rote": "red", "blaue": "blue", "grüne": "green", "alte": "old", "neue": "new", "kleine": "small",
    "große": "big", "schöne": "beautiful", "teure": "expensive", "weiße": "white",
}  # fmt: skip
_ACTS = {
    "kauft": "buys", "verkauft": "sells", "sucht": "looks for", "findet": "finds", "sieht": "sees",
    "braucht": "needs", "zählt": "counts", "malt": "paints", "verliert": "loses", "hat": "has",
}  # fmt: skip
_PLACES = {
    "im Garten": "in the garden", "am Bahnhof": "at the station", "in der Schule": "at school",
    "auf dem Markt": "at the market", "zu Hause": "at home", "im Büro": "in the office",
    "in der Küche": "in the kitchen", "am Fluss": "by the river",
}  # fmt: skip
_VEHICLES = {"Der Zug": "The train", "Der Bus": "The bus", "Das Schiff": "The ship", "Die Fähre": "The ferry"}
_EVENTS = {
    "Das Konzert": "The concert", "Die Sitzung": "The meeting", "Der Film": "The film",
    "Das Spiel": "The match", "Der Unterricht": "The lesson", "Die Prüfung": "The exam",
}  # fmt: skip

Phrase = tuple[str, str, str]
"""A phrase in German and English, and the number or name that it adds to the sentence's combination."""


@dataclass(frozen=True)
class Sentence:
    """A German sentence, its translation, and the combination of numbers and names in it."""

    german: str
    english: str
    combination: tuple[str, ...]


def german_number(n: int) -> str:
    """A number from 0 to 999,999 in German words: 21 is einundzwanzig."""
    if n == 1:
        return "eins"
    return _german_below_million(n)


def english_number(n: int) -> str:
    """A number from 0 to 999,999 in English words: 121 is one hundred and twenty-one."""
    if n < 20:
        return _UNITS_EN[n]
    if n < 100:
        return _TENS_EN[n // 10] + (f"-{_UNITS_EN[n % 10]}" if n % 10 else "")
    if n < 1000:
        rest = f" and {english_number(n % 100)}" if n % 100 else ""
        return f"{_UNITS_EN[n // 100]} hundred{rest}"
    rest = "" if n % 1000 == 0 else f"{' and' if n % 1000 < 100 else ''} {english_number(n % 1000)}"
    return f"{english_number(n // 1000)} thousand{rest}"


def sentence(random_: random.Random) -> Sentence:
    """Draw one sentence."""
    german, english, combination = random_.choice(_PATTERNS)(random_)
    return Sentence(german[0].upper() + german[1:], english[0].upper() + english[1:], combination)


def split_of(combination: tuple[str, ...]) -> str:
    """The one split that a combination belongs to: train, validation or test."""
    number = hashlib.sha256("|".join(combination).encode()).digest()[0] % HELD_BACK
    return {0: "test", 1: "validation"}.get(number, "train")


def generate(train: int, held_back: int, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """`train` pairs (German, English) for training, and `held_back` pairs each for validation and test.

    No sentence occurs twice, and no combination of numbers and names occurs in two splits.
    """
    random_ = random.Random(seed)
    wanted = {"train": train, "validation": held_back, "test": held_back}
    pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in wanted}
    seen: set[str] = set()
    while any(len(pairs[split]) < count for split, count in wanted.items()):
        drawn = sentence(random_)
        split = split_of(drawn.combination)
        if drawn.german not in seen and len(pairs[split]) < wanted[split]:
            seen.add(drawn.german)
            pairs[split].append((drawn.german, drawn.english))
    return pairs


def _german_below_million(n: int) -> str:
    if n < 20:
        return _UNITS_DE[n]
    if n < 100:
        unit = "ein" if n % 10 == 1 else _UNITS_DE[n % 10]
        return (f"{unit}und" if n % 10 else "") + _TENS_DE[n // 10]
    step, word = (100, "hundert") if n < 1000 else (1000, "tausend")
    count = "ein" if n // step == 1 else _german_below_million(n // step)
    return count + word + (_german_below_million(n % step) if n % step else "")


def _pick(random_: random.Random, pairs: dict[str, str]) -> tuple[str, str]:
    german = random_.choice(list(pairs))
    return german, pairs[german]


def _count(random_: random.Random) -> Phrase:
    """A number above one, in words or digits."""
    n = random_.randint(2, random_.choice((20, 100, 1000)) - 1)
    if random_.random() < 0.6:
        return german_number(n), english_number(n), str(n)
    n = random_.randint(2, random_.choice((100, 10_000, 1_000_000)) - 1)
    return f"{n:,}".replace(",", "."), f"{n:,}", str(n)


def _price(random_: random.Random) -> Phrase:
    cents = random_.randint(100, random_.choice((2_000, 20_000, 500_000)))
    english = f"{cents // 100:,}.{cents % 100:02}"
    german = english.replace(",", "x").replace(".", ",").replace("x", ".")
    return f"{german} Euro", f"{english} euros", english


def _time(random_: random.Random) -> Phrase:
    """A time of day as people say it: by the half and quarter hour, or in digits."""
    hour, minute = random_.randint(1, 12), random_.randint(0, 59)
    after = hour % 12 + 1
    kind = random_.randrange(5)
    if kind == 0:
        return f"halb {german_number(after)}", f"half past {english_number(hour)}", f"{hour}:30"
    if kind == 1:
        return (
            f"Viertel nach {german_number(hour)}", f"a quarter past {english_number(hour)}", f"{hour}:15"
        )  # fmt: skip
    if kind == 2:
        return f"Viertel vor {german_number(after)}", f"a quarter to {english_number(after)}", f"{hour}:45"
    if kind == 3:
        minutes = random_.randint(2, 29)
        return (
            f"{german_number(minutes)} Minuten nach {german_number(hour)}",
            f"{english_number(minutes)} minutes past {english_number(hour)}",
            f"{hour}:{minutes:02}",
        )
    hour = random_.randint(0, 23)
    return f"{hour}.{minute:02} Uhr", f"{hour}:{minute:02}", f"{hour}:{minute:02}"


def _date(random_: random.Random) -> Phrase:
    day, month, year = random_.randint(1, 28), random_.randrange(12), random_.randint(1900, 2029)
    german, english = f"{day}. {_MONTHS_DE[month]}", f"{_MONTHS_EN[month]} {day}"
    if random_.random() < 0.5:
        return german, english, f"{month}-{day}"
    return f"{german} {year}", f"{english}, {year}", f"{year}-{month}-{day}"


Drawn = tuple[str, str, tuple[str, ...]]


def _shopping(random_: random.Random) -> Drawn:
    name, (count, number, n) = random_.choice(_NAMES), _count(random_)
    act_de, act_en = _pick(random_, _ACTS)
    thing_de, thing_en = _pick(random_, _THINGS)
    colour_de, colour_en = _pick(random_, _COLOURS) if random_.random() < 0.5 else ("", "")
    place_de, place_en = _pick(random_, _PLACES) if random_.random() < 0.4 else ("", "")
    german = " ".join(f"{name} {act_de} {place_de} {count} {colour_de} {thing_de}".split())
    english = " ".join(f"{name} {act_en} {number} {colour_en} {thing_en} {place_en}".split())
    return f"{german}.", f"{english}.", (name, n)


def _past(random_: random.Random) -> Drawn:
    """The German perfect puts its verb at the end, after everything else."""
    verbs = {
        "gekauft": "bought",
        "gefunden": "found",
        "gezählt": "counted",
        "verloren": "lost",
        "gemalt": "painted",
    }
    name, (count, number, n) = random_.choice(_NAMES), _count(random_)
    day = random_.randrange(7)
    verb_de, verb_en = _pick(random_, verbs)
    thing_de, thing_en = _pick(random_, _THINGS)
    return (
        f"am {_DAYS_DE[day]} hat {name} {count} {thing_de} {verb_de}.",
        f"{name} {verb_en} {number} {thing_en} on {_DAYS_EN[day]}.",
        (name, n),
    )


def _cost(random_: random.Random) -> Drawn:
    (count, number, n), (price_de, price_en, p) = _count(random_), _price(random_)
    thing_de, thing_en = _pick(random_, _THINGS)
    if random_.random() < 0.5:
        return f"{count} {thing_de} kosten {price_de}.", f"{number} {thing_en} cost {price_en}.", (n, p)
    name = random_.choice(_NAMES)
    return (
        f"{name} hat {price_de} für {count} {thing_de} bezahlt.",
        f"{name} paid {price_en} for {number} {thing_en}.",
        (name, n, p),
    )


def _departure(random_: random.Random) -> Drawn:
    (vehicle_de, vehicle_en), (city_de, city_en) = _pick(random_, _VEHICLES), _pick(random_, _CITIES)
    time_de, time_en, t = _time(random_)
    if random_.random() < 0.5:
        return (
            f"{vehicle_de} nach {city_de} fährt um {time_de} ab.",
            f"{vehicle_en} to {city_en} leaves at {time_en}.",
            (city_de, t),
        )
    count = random_.randint(2, 99)
    return (
        f"{vehicle_de} aus {city_de} kommt um {time_de} mit {german_number(count)} Minuten Verspätung an.",
        f"{vehicle_en} from {city_en} arrives at {time_en}, {english_number(count)} minutes late.",
        (city_de, t, str(count)),
    )


def _birthday(random_: random.Random) -> Drawn:
    name, (date_de, date_en, d) = random_.choice(_NAMES), _date(random_)
    if random_.random() < 0.5:
        return f"{name} wurde am {date_de} geboren.", f"{name} was born on {date_en}.", (name, d)
    age = random_.randint(2, 99)
    return (
        f"am {date_de} wird {name} {german_number(age)} Jahre alt.",
        f"{name} turns {english_number(age)} on {date_en}.",
        (name, d, str(age)),
    )


def _event(random_: random.Random) -> Drawn:
    (event_de, event_en), (date_de, date_en, d) = _pick(random_, _EVENTS), _date(random_)
    time_de, time_en, t = _time(random_)
    return (
        f"{event_de} beginnt am {date_de} um {time_de}.",
        f"{event_en} begins at {time_en} on {date_en}.",
        (d, t),
    )


def _clock(random_: random.Random) -> Drawn:
    time_de, time_en, t = _time(random_)
    name, other = random_.sample(_NAMES, 2)
    return (
        f"wenn es {time_de} ist, ruft {name} {other} an.",
        f"when it is {time_en}, {name} calls {other}.",
        (name, other, t),
    )


def _distance(random_: random.Random) -> Drawn:
    (from_de, from_en), (to_de, to_en) = _pick(random_, _CITIES), _pick(random_, _CITIES)
    count, number, n = _count(random_)
    return (
        f"von {from_de} nach {to_de} sind es {count} Kilometer.",
        f"it is {number} kilometres from {from_en} to {to_en}.",
        (from_de, to_de, n),
    )


def _question(random_: random.Random) -> Drawn:
    name, (price_de, price_en, p) = random_.choice(_NAMES), _price(random_)
    thing_de, thing_en = _pick(random_, _THINGS)
    return (
        f"warum hat {name} für diese {thing_de} nur {price_de} bezahlt?",
        f"why did {name} pay only {price_en} for these {thing_en}?",
        (name, p),
    )


_PATTERNS: tuple[Callable[[random.Random], Drawn], ...] = (
    _shopping, _shopping, _past, _cost, _departure, _birthday, _event, _clock, _distance, _question,
)  # fmt: skip
