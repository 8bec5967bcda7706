# The synthetic language that the tiny model speaks: seeded grammars for four domains.
#
# arith   three-digit sums, worked out digit by digit; the answer can be checked
# code    Python-like functions
# json    lines of records: people, orders, log lines
# prose   short stories whose names come back
#
# Every text is a pure function of (domain, split, seed), on the standard library alone.
# The two splits draw from different streams, and in arith no sum is in both.

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

END_OF_TEXT = "<|endoftext|>"
DOMAINS = ("arith", "code", "json", "prose")

# ---------------------------------------------------------------------------- arith

OPERAND_MIN = 100
TOTAL_MAX = 999  # three digits in, three digits out: the length depends on the carries only
HELDOUT_ONE_IN = 8
ANSWER_MARK = ">"
PROBLEM = re.compile(r"(\d+)\+(\d+):")
ANSWERED = re.compile(rf"[^{ANSWER_MARK}]*{ANSWER_MARK}(\d+)")


@dataclass(frozen=True)
class Sum:
    """One addition.

    >>> Sum(347, 588).prompt, Sum(347, 588).completion
    ('347+588:', '7+8=15 4+8+1=13 3+5+1=9>935')
    """

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}:"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def completion(self) -> str:
        steps, carry = [], 0
        for a, b in zip(reversed(str(self.left)), reversed(str(self.right)), strict=True):
            total = int(a) + int(b) + carry
            steps.append(f"{a}+{b}{'+1' if carry else ''}={total}")
            carry = total // 10
        return " ".join(steps) + ANSWER_MARK + self.answer

    @property
    def split(self) -> Split:
        return "train" if (self.left * 3 + self.right) % HELDOUT_ONE_IN else "heldout"


def draw_sum(rng: random.Random, split: Split) -> Sum:
    """A random addition of the given split."""
    while True:
        left = rng.randint(OPERAND_MIN, TOTAL_MAX - OPERAND_MIN)
        problem = Sum(left, rng.randint(OPERAND_MIN, TOTAL_MAX - left))
        if problem.split == split:
            return problem


def open_sum(prompt: str) -> Sum:
    """The addition that the prompt leaves open: its last document.

    Raises:
        ValueError: the prompt does not end in an open addition.
    """
    asked = PROBLEM.fullmatch(prompt.rpartition(END_OF_TEXT)[2].strip())
    if asked is None:
        raise ValueError(f"the prompt does not end in an open addition: {prompt[-40:]!r}")
    return Sum(int(asked[1]), int(asked[2]))


def reward(prompt: str, completion: str) -> float:
    """1.0 where the completion answers the last addition of the prompt, else 0.0.

    The steps are not judged, but the answer must be whole and the last thing said.

    >>> reward("347+588:", "7+8=15 4+8+1=13 3+5+1=9>935")
    1.0
    >>> reward("347+588:", "7+8=15 4+8+1=13 3+5+1=9>93")
    0.0
    """
    said = ANSWERED.fullmatch(completion.partition(END_OF_TEXT)[0].strip())
    return float(said is not None and said[1] == open_sum(prompt).answer)


# ------------------------------------------------------------------- shared vocabulary


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    """One phrase a line, or several with bars between them."""
    return [phrase.strip() for line in text.strip().splitlines() for phrase in line.split("|")]


ONSETS = words("B Br D Dr F G Gr H J K L M N P R S T Tr V W Z Sh Th")
VOWELS = words("a e i o u ai ea ie")
MIDDLES = words("l m n r s t v d ld nd rr ss lv")
ENDINGS = words("a o en in el is or an ia us ett und ock ley win")


def name(rng: random.Random) -> str:
    """An invented proper name: some 30,000 of them, so that each has to be read and kept."""
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(MIDDLES) + rng.choice(ENDINGS)


def names(rng: random.Random, n: int) -> list[str]:
    """Distinct invented names."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[name(rng)] = None
    return list(found)


# ----------------------------------------------------------------------------- code

CODE_VERBS = words(
    """
    count collect merge filter group rank scan sum find drop split index pack check update
    trace sort average clean convert load match measure reduce select store weigh
    """
)
CODE_NOUNS = words(
    """
    item row word line node edge user order price token page event score value point file
    path block cell key record sample step task unit window field label batch packet
    """
)
CODE_SCALARS = words("limit size offset scale start factor depth weight width bound budget rate")
CODE_TOTALS = words("total result best found kept seen current last high low left extra")
CODE_ATTRIBUTES = words("name size cost kind rank depth owner length level color index state")
COMPARISONS = ("<", ">", "<=", ">=", "==", "!=")
OPERATORS = ("+", "-", "*", "//", "%")
INDENT = "    "


@dataclass
class Scope:
    """What a function body may mention: the loop variable, and every number in sight."""

    rng: random.Random
    each: str
    numbers: list[str]

    def number(self) -> str:
        if self.rng.random() < 0.3:
            return str(self.rng.randint(0, 20))
        return self.rng.choice(self.numbers)

    def reading(self) -> str:
        """Something number-like about the current element."""
        attribute = self.rng.choice(CODE_ATTRIBUTES)
        return self.rng.choice(
            [
                self.each,
                f"{self.each}.{attribute}",
                f"len({self.each})",
                f'{self.each}["{attribute}"]',
                f"abs({self.each} - {self.number()})",
            ]
        )

    def expression(self) -> str:
        operand = self.rng.choice([self.number, self.reading])()
        return f"{self.number()} {self.rng.choice(OPERATORS)} {operand}"

    def test(self) -> str:
        return f"{self.reading()} {self.rng.choice(COMPARISONS)} {self.number()}"


def loop_lines(scope: Scope, target: str, out: str) -> list[str]:
    """One statement of the loop body, in one to four lines."""
    rng = scope.rng
    kind = rng.randrange(6)
    if kind == 0:
        return [f"{target} = {scope.expression()}"]
    if kind == 1:
        return [f"{target} {rng.choice('+-*')}= {scope.reading()}"]
    if kind == 2:
        return [f"if {scope.test()}:", INDENT + rng.choice(["continue", "break"])]
    if kind == 3:
        return [f"if {scope.test()}:", INDENT + f"{out}.append({scope.reading()})"]
    if kind == 4:
        pick = rng.choice(["max", "min"])
        return [f"{target} = {pick}({target}, {scope.reading()})"]
    return [
        f"if {scope.test()}:",
        INDENT + f"{target} += {scope.number()}",
        "else:",
        INDENT + f"{out}.append({scope.expression()})",
    ]


def code_document(rng: random.Random) -> str:
    """A function that walks a list, and a few lines that call it."""
    verb, noun = rng.choice(CODE_VERBS), rng.choice(CODE_NOUNS)
    function, many = f"{verb}_{noun}s", f"{noun}s"
    scalars = rng.sample(CODE_SCALARS, rng.randint(1, 2))
    totals = rng.sample(CODE_TOTALS, rng.randint(1, 2))
    out = rng.choice(["out", "chosen", "picked"])
    scope = Scope(rng, noun, [*scalars, *totals])

    defaults = [s if rng.random() < 0.5 else f"{s}={rng.randint(0, 99)}" for s in scalars]
    lines = [f"def {function}({', '.join([many, *sorted(defaults, key=lambda d: '=' in d)])}):"]
    purpose = rng.choice(
        [
            f"Return the {totals[0]} of all {many} up to {scalars[0]}.",
            f"{verb.capitalize()} the {many} by {rng.choice(CODE_ATTRIBUTES)}.",
            f"Walk over {many} and {verb} every {noun} below the {scalars[0]}.",
            f"{verb.capitalize()} each {noun} once, in order.",
        ]
    )
    body = [f'"""{purpose}"""']
    body += [f"{total} = {rng.randint(0, 12)}" for total in totals] + [f"{out} = []"]
    if rng.random() < 0.4:
        body += [f"if not {many}:", INDENT + f"return {rng.choice([out, totals[0]])}"]
    if rng.random() < 0.3:
        body += [f"for index, {noun} in enumerate({many}):"]
        scope.numbers.append("index")
    else:
        body += [f"for {noun} in {many}:"]
    for _ in range(rng.randint(2, 4)):
        body += [INDENT + line for line in loop_lines(scope, rng.choice(totals), out)]
    if rng.random() < 0.5:
        raised = rng.choice(["ValueError", "KeyError", "RuntimeError"])
        body += [
            f"if {totals[0]} {rng.choice(COMPARISONS)} {rng.choice(scalars)}:",
            INDENT + f'raise {raised}("no {noun} within the {rng.choice(scalars)}")',
        ]
    body += [f"return {rng.choice([totals[-1], out, f'{totals[0]}, {out}', f'sorted({out})'])}"]
    lines += [INDENT + line for line in body]

    holder = rng.choice(CODE_TOTALS)
    argument = rng.choice(
        [many, f"load_{many}()", str([rng.randint(0, 99) for _ in range(rng.randint(2, 4))])]
    )
    call = ", ".join([argument, *(str(rng.randint(0, 99)) for _ in scalars)])
    lines += ["", f"{holder} = {function}({call})", f"print({holder})"]
    return "\n".join(lines)


# ----------------------------------------------------------------------------- json

CITIES = words(
    """
    Harrow Quill Marden Oster Pell Southby Tarn Ulver Venn Wexcombe Yarrow Zell Ashford
    Birch Coldwell Dunmere
    """
)
TRADES = words(
    """
    baker carpenter driver engineer farmer gardener glazier joiner miller nurse painter
    pilot printer sailor teacher tailor weaver writer
    """
)
GOODS = words(
    """
    lamp kettle chair bucket ladder carpet mirror blanket candle basket hammer wallet
    notebook teapot pillow compass bottle whistle
    """
)
MATERIALS = words("oak iron wool glass paper copper linen stone brass leather")
STATUSES = words("open paid packed shipped returned cancelled")
LEVELS = words("debug info info info warning error")
SERVICES = words("gateway billing search mailer storage scheduler auth cache")
HAPPENINGS = phrases(
    """
    request accepted|request rejected|retry scheduled|timeout while reading|cache miss
    cache hit|connection closed|worker started|worker stopped|queue is full|token expired
    disk is slow|checksum mismatch|user logged in|user logged out
    """
)
CENTS = 100

Record = dict[str, object]


def person(rng: random.Random, ident: int) -> Record:
    first, last = names(rng, 2)
    host = rng.choice(["mail", "post", "home", "work"])
    record: Record = {"id": ident, "name": f"{first} {last}"}
    record["email"] = f"{first.lower()}.{last.lower()}@{host}.example"
    record |= {"age": rng.randint(18, 90), "city": rng.choice(CITIES)}
    if rng.random() < 0.7:
        record["trade"] = rng.choice(TRADES)
    if rng.random() < 0.4:
        record["active"] = rng.random() < 0.8
    return record


def order(rng: random.Random, ident: int, customers: list[str]) -> Record:
    quantity, price = rng.randint(1, 12), rng.randint(100, 9999) / CENTS
    record: Record = {"order": ident, "customer": rng.choice(customers)}
    record["item"] = f"{rng.choice(MATERIALS)} {rng.choice(GOODS)}"
    record |= {"quantity": quantity, "price": price, "status": rng.choice(STATUSES)}
    if rng.random() < 0.4:
        record["ship_to"] = rng.choice(CITIES)
    return record


def log_line(rng: random.Random, minute: int, services: list[str], users: list[str]) -> Record:
    record: Record = {
        "time": f"{minute // 60 % 24:02d}:{minute % 60:02d}:{rng.randint(0, 59):02d}",
        "level": rng.choice(LEVELS),
        "service": rng.choice(services),
        "event": rng.choice(HAPPENINGS),
    }
    if rng.random() < 0.7:
        record["user"] = rng.choice(users)
    if rng.random() < 0.5:
        record["ms"] = rng.randint(1, 2000)
    return record


def json_document(rng: random.Random) -> str:
    """A few records of one kind, one a line; ids count up, customers and users come back."""
    kind = rng.choice(["people", "orders", "log"])
    ident, minute = rng.randint(100, 9000), rng.randint(0, 24 * 60)
    if kind == "people":
        records = [person(rng, ident + i) for i in range(rng.randint(2, 3))]
    elif kind == "orders":
        customers = names(rng, 2)
        records = [order(rng, ident + i, customers) for i in range(3)]
    else:
        services, users, records = rng.sample(SERVICES, 2), names(rng, 2), []
        for _ in range(rng.randint(3, 4)):
            minute += rng.randint(0, 3)
            records.append(log_line(rng, minute, services, users))
    return "\n".join(json.dumps(record) for record in records)


# ---------------------------------------------------------------------------- prose

PLACES = phrases(
    """
    the harbour|the old mill|the market|the north tower|the orchard|the library|the bridge
    the quarry|the lighthouse|the railway station|the garden|the chapel|the workshop
    the island|the frozen lake|the edge of the forest
    """
)
THINGS = words(
    """
    key map lantern letter clock coin drum feather flute knife mirror needle parcel ribbon
    rope shell spoon telescope violin wheel whistle book boat bell
    """
)
LOOKS = words(
    """
    small red broken silver heavy strange old wooden green bright empty blue rusty painted
    cold narrow
    """
)
MOODS = words("happy tired afraid proud angry calm curious lonely patient surprised")
WEATHER = phrases(
    """
    It was raining|The sun was low|Snow lay on the roofs|A warm wind came from the sea
    The fog would not lift|It was almost dark|The first stars were out|It was market day
    Nobody had slept well|The bells had just rung
    """
)
TIMES = phrases(
    """
    The next morning|Before noon|That evening|An hour later|On the third day|After the storm
    When the moon rose|In the spring|Two days later|Late that night
    """
)
WALKS = words("walked ran went hurried drove sailed climbed wandered crept")
FINDS = words("found saw lost bought sold hid carried dropped painted mended opened")
SPEAKS = words("said whispered shouted asked laughed cried answered sang")
KIN = words("sister brother mother father uncle cousin neighbour teacher friend")
SAYINGS = phrases(
    """
    I have never seen it before|It belongs to {b}|You must not tell {b}
    We should go back to {p}|Give me the {t}|The {t} is not here|I will wait for you at {p}
    Nobody goes to {p} any more|{b} knows the way|There is still time
    It was {b} who took the {t}|My {k} made this {t}|Please be careful|I was wrong about {b}
    """
)
SENTENCES = (
    '"{s}," {v} {a}.',
    '"{s}," {v} {a}, and looked at the {t}.',
    "{a} {w} to {p}, and {b} followed.",
    "{a} {w} to {p} with the {l} {t}.",
    "{when}, {a} {f} a {l} {t} near {p}.",
    "{when}, {a} and {b} {w} to {p}.",
    "{a} {f} the {t} and gave it to {b}.",
    "{a} was {m}, because {b} had {f2} the {t}.",
    "{b} was {m} and did not answer.",
    "{weather}, and {a} felt {m}.",
    "The {k} of {a} came from {p} to ask about the {t}.",
    "Nobody at {p} had heard of {a}.",
    "For a long time {a} thought about {b} and the {l} {t}.",
    "{b} had {f2} a {l} {t2}, but {a} wanted the {t}.",
    "They left {p} and {w} home.",
)
PARTICIPLES = words("found lost bought sold hidden broken stolen kept seen forgotten")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")  # "a old key" -> "an old key"


def prose_document(rng: random.Random) -> str:
    """A story of two or three people, one thing and two places."""
    people = names(rng, rng.randint(2, 3))
    thing, other = rng.sample(THINGS, 2)
    look, places = rng.choice(LOOKS), rng.sample(PLACES, 2)
    opening = rng.choice(
        [
            "{weather}. {a} lived near {p} with a {k} named {b}.",
            "Once there was a {m} {job} named {a}, who had a {l} {t}.",
            "{a} and {b} met at {p}. {weather}.",
            "In {city} everybody knew {a}, the {job}, and the {l} {t}.",
            "{weather} when {a} came to {p}.",
        ]
    )
    closing = rng.choice(
        [
            "In the end {b} kept the {t}, and {a} was {m}.",
            "And so the {l} {t} stayed at {p}.",
            "{a} never saw {b} again.",
            "After that, {a} and {b} were friends.",
        ]
    )

    def tell(template: str) -> str:
        a, b = rng.sample(people, 2)
        fill = {
            "a": a,
            "b": b,
            "t": thing,
            "t2": other,
            "l": look if rng.random() < 0.7 else rng.choice(LOOKS),
            "p": rng.choice(places),
            "k": rng.choice(KIN),
            "m": rng.choice(MOODS),
            "v": rng.choice(SPEAKS),
            "w": rng.choice(WALKS),
            "f": rng.choice(FINDS),
            "f2": rng.choice(PARTICIPLES),
            "job": rng.choice(TRADES),
            "city": rng.choice(CITIES),
            "when": rng.choice(TIMES),
            "weather": rng.choice(WEATHER),
        }
        told = template.format(s=rng.choice(SAYINGS).format(**fill), **fill)
        return ARTICLE.sub(r"\1n ", told)

    middle = [rng.choice(SENTENCES) for _ in range(rng.randint(5, 7))]
    return " ".join(tell(template) for template in [opening, *middle, closing])


# ------------------------------------------------------------------------- documents


def arith_document(rng: random.Random, split: Split) -> str:
    problem = draw_sum(rng, split)
    return problem.prompt + problem.completion


WRITERS: dict[str, Callable[[random.Random], str]] = {
    "code": code_document,
    "json": json_document,
    "prose": prose_document,
}


def stream(domain: str, split: Split, seed: int) -> random.Random:
    """The random stream of one (domain, split, seed); no two of them are alike."""
    return random.Random(f"{domain}/{split}/{seed}")


def documents(domain: str, split: Split, seed: int) -> Iterator[str]:
    """Endless documents of one domain, without the end-of-text mark."""
    rng = stream(domain, split, seed)
    while True:
        yield arith_document(rng, split) if domain == "arith" else WRITERS[domain](rng)
