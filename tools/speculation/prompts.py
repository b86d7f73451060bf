"""The prompts for all engines: texts to copy with changes, and texts to invent."""

from __future__ import annotations

NOTICE = """The reading room on the second floor will be closed from Monday to Wednesday of next \
week. Workers are going to replace the old windows, and the floor has to dry before anybody can \
walk on it. Books that were ordered for these days can be fetched at the desk in the entrance \
hall. The newspapers are kept in the small room behind the stairs. We are sorry for the noise, \
and we thank all readers for their patience. From Thursday on the room is open as usual, from \
nine in the morning until eight in the evening."""
RECIPE = """Cut two onions and one carrot into small pieces. Warm three spoons of oil in a large \
pot and add the onions. When they are soft, add the carrot, a spoon of salt and a litre of water. \
Cook the soup for twenty minutes. Add two hundred grams of noodles and cook it for eight minutes \
more. Taste the soup before you serve it, and put some parsley on each plate."""
CODE = """def total(prices, discount):
    result = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        result = result + price
    if discount > 0:
        result = result - result * discount
    return result
"""

COPIES = (
    f"Repeat this notice word for word, but write Friday instead of Thursday.\n\n{NOTICE}",
    f"Correct the spelling and give back the whole text.\n\n{NOTICE.replace('replace', 'replase')}",
    f"Repeat this recipe, with four onions instead of two.\n\n{RECIPE}",
    f"Write this recipe as JSON, a list of its sentences.\n\n{RECIPE}",
    f"Rename result to amount, and give back the whole function.\n\n{CODE}",
)
NEW = (
    "Write a short story about a fox who is afraid of the dark.",
    "Explain to a child why the sea is salty.",
    "What should I think about before I buy a used bicycle?",
    "Describe a morning in a busy railway station.",
    "Give five reasons to learn a second language.",
)
ASKED = {"copies": COPIES, "new": NEW, "mixed": (*COPIES, *NEW)}
DRAWN = {"drawn": NEW}  # jaxserve only, at a temperature without repetition
TOGETHER = ("mixed", "drawn")
STREAMS = 16  # at once, of these
MAX_TOKENS = 160
