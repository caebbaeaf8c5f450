"""Three kinds of text, about 120 characters a message: how well a text compresses decides what a copy of it costs.

repeated   one sentence four times: the best case
prose      words of a list of our own, as frequent as words of a language are (Zipf), in sentences
random     random bytes in base64: the worst case, since nothing but the base64 compresses

Every text is the same in every run.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

SEED = 12
LENGTH = 120

#: the most frequent words, in order of frequency
COMMON = """
    the of and to a in it is that for on was with as be this by at have from or not are we they but you all
    there will one which so if can what when then more has them some into only other than now its over also
    after no first our must how two may these been could before through where most such any each again still
    here until while both under without never between another because every same last few own next once
""".split()  # noqa: SIM905  a list of words is read as text
STEMS = """
    agent answer batch bind block broker build bundle cache call carry change channel check claim clock commit
    connect copy count crash cut deal debt deliver depend deploy depth direct doubt draft drop edge edit effect
    end engine error event expect export fact fail fetch field file find fix flag fleet floor fold follow frame
    gate gather grant graph group grow guard handle harbour harvest head hold host index inspect item join judge
    keep kernel key label lane lease ledger lesson level limit line link list load lock log lose machine mail
    mark measure meet member merge message metal meter mind mirror model month morning mount move name network
    night note number offer open order owner pack page paper part patch path pattern pause people place plan
    plant point port power press print probe process prompt proof publish pull purge push query question queue
    quiet range rate reach read reason record refuse region release remain repair repeat report request reserve
    rest result return review right ring river road role room root round route rule run sample save scale season
    second secret seek segment send sense series server settle shape share shard shift ship sign signal silence
    slice sort sound source space spark spell split stage stand start state station steward stop store storm
    stream stretch string study subject sum supply surface switch table tail take talk target task team tell
    term test thread throw tick tie time token tool total touch tower trace track trade train transfer travel
    tree trigger trust turn type unit update value vector verify version visit voice wait wake walk watch water
    wave week weigh window winter wire witness wonder word work worker write yard year yield zone
""".split()  # noqa: SIM905  a list of words is read as text
ENDINGS = ("", "s", "ed", "ing", "er", "ers", "able", "ment")


def repeated() -> Iterator[str]:
    for n in count():
        yield f"message {n}: " + "what is to be said about it " * 4


def prose() -> Iterator[str]:
    chosen = random.Random(SEED)
    rare = [stem + ending for ending in ENDINGS for stem in chosen.sample(STEMS, len(STEMS))]
    words = [*COMMON, *rare]
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(words))))
    while True:
        text = ""
        while len(text) < LENGTH - 8:
            said = chosen.choices(words, cum_weights=weights, k=chosen.randint(5, 14))
            if chosen.random() < 0.2:
                said[-1] = str(chosen.randint(2, 5_000))
            text += " ".join(said).capitalize() + chosen.choice((". ", ". ", ", ", "? "))
        yield text[:LENGTH].rstrip()


def incompressible() -> Iterator[str]:
    chosen = random.Random(SEED)
    while True:
        yield base64.b64encode(chosen.randbytes(LENGTH * 3 // 4)).decode()


TEXTS: dict[str, Callable[[], Iterator[str]]] = {"repeated": repeated, "prose": prose, "random": incompressible}
