"""Twenty real prompts of different kinds: what the demo, the benchmarks and the losslessness check run on.

All texts are written for this project. Each is one user message; the model's chat template is applied to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message.

    Attributes:
        name: unique among the prompts.
        kind: "chat", "code_edit", "code", "summary", "list", "extract", "rewrite" or "story".
        text: the message.
        max_tokens: length that suits the prompt in benchmarks.
        demo: one of the four that the demo shows.
    """

    name: str
    kind: str
    text: str
    max_tokens: int
    demo: bool = False


_INVENTORY = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if name in self.items:
            self.items[name] += count
        else:
            self.items[name] = count

    def remove(self, name, count):
        if name not in self.items:
            raise KeyError(name)
        if self.items[name] < count:
            raise ValueError("not enough items")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())

    def report(self):
        for name, count in sorted(self.items.items()):
            print(name, count)
"""

_STATISTICS = """\
def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
"""

_TIDES = """\
Tides are the regular rise and fall of the sea. They are caused mainly by the gravity of the Moon, which pulls the \
water of the ocean towards it. On the side of the Earth that faces the Moon the water bulges outwards. A second bulge \
forms on the opposite side, because there the pull of the Moon is weaker than at the centre of the Earth. As the Earth \
turns, most coasts pass through both bulges each day and therefore see two high tides and two low tides. The Sun also \
has an effect, about half as strong as that of the Moon. When Sun, Moon and Earth are in a line, at new moon and full \
moon, the two effects add up and the tides are especially strong; these are called spring tides. When the Sun and the \
Moon are at right angles, the effects partly cancel and the weaker neap tides follow. The shape of the coast matters \
too: in narrow bays the difference between high and low water can be more than ten metres."""

_BRIDGE = """\
The old stone bridge at Harlow was built in 1782 by the mason Thomas Reed. It has five arches and is 64 metres long. \
In the flood of 1911 two of the arches fell, and for nine years a ferry carried people and goods across the river. The \
town rebuilt the arches in 1920 with stone from the same quarry. Since 1987 the bridge has been closed to cars. Today \
about 3,000 people cross it each day on foot or by bicycle, and every May a market is held on it."""

_MEETING = """\
Anna opened the meeting at ten. The team agreed to move the release of version 2.4 from Tuesday to Friday, because the \
import of old invoices still fails for customers with more than one currency. Ben will fix the import by Wednesday. \
Carla will write the release notes and send them to Ben for review. The budget for the new test machines was approved; \
David orders them this week. The next meeting is on Monday at nine."""

PROMPTS = (
    Prompt("chat_sky", "chat", "Why is the sky blue during the day but red at sunset?", 128, demo=True),
    Prompt(
        "code_edit_inventory",
        "code_edit",
        "Rename the method `remove` to `take` in this Python class and change nothing else. Answer with the whole "
        f"class in one code block.\n\n```python\n{_INVENTORY}```",
        224,
        demo=True,
    ),
    Prompt(
        "summary_tides",
        "summary",
        f"Summarize the following passage in a few sentences, in its own words.\n\n{_TIDES}",
        128,
        demo=True,
    ),
    Prompt("list_habits", "list", "Give me a list of eight habits that help people sleep better.", 160, demo=True),
    Prompt("chat_sourdough", "chat", "My sourdough bread comes out too dense. What could be wrong?", 128),
    Prompt("chat_interview", "chat", "How should I prepare for my first job interview next week?", 128),
    Prompt("chat_cat", "chat", "My cat wakes me up at five every morning. What can I do?", 128),
    Prompt("chat_photosynthesis", "chat", "Explain photosynthesis to a ten-year-old child.", 128),
    Prompt(
        "code_edit_statistics",
        "code_edit",
        "Add type hints to these Python functions and change nothing else. Answer with the whole code in one code "
        f"block.\n\n```python\n{_STATISTICS}```",
        224,
    ),
    Prompt(
        "code_primes", "code", "Write a Python function that returns all prime numbers below n, with comments.", 160
    ),
    Prompt("code_sql", "code", "Write a SQL query that lists the five customers with the highest total of orders.", 96),
    Prompt("code_palindrome", "code", "Write a JavaScript function that checks whether a string is a palindrome.", 128),
    Prompt("summary_bridge", "summary", f"Summarize this text in two sentences.\n\n{_BRIDGE}", 96),
    Prompt("summary_meeting", "summary", f"Write a short summary of these minutes.\n\n{_MEETING}", 96),
    Prompt("list_capitals", "list", "List the capitals of ten countries in Europe, one per line.", 128),
    Prompt(
        "list_picnic",
        "list",
        "Write a numbered list of ten things to bring to a picnic, each with a short reason.",
        160,
    ),
    Prompt(
        "extract_tasks",
        "extract",
        f"Who has to do what? Answer as a list with one line per person.\n\n{_MEETING}",
        96,
    ),
    Prompt("extract_years", "extract", f"List every year in this text and what happened then.\n\n{_BRIDGE}", 96),
    Prompt(
        "rewrite_polite",
        "rewrite",
        "Rewrite this message so that it is polite: You are late again with the report. Send it today or I will tell "
        "the boss.",
        96,
    ),
    Prompt(
        "story_lighthouse",
        "story",
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        160,
    ),
)
"""All prompts, the four of the demo first."""

DEMO_PROMPTS = tuple(prompt for prompt in PROMPTS if prompt.demo)
