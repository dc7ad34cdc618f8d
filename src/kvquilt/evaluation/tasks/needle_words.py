"""The words of the needle task: names, and the sentences and questions about them, of the project's own making."""

from __future__ import annotations

from kvquilt.evaluation.tasks.word_lists import joined

NAMES = joined(
    "Ar Bel Cor Dra Esk Fen Gor Hal Iv Jor Kel Lom Mir Nor Oth Pel Quor Ran Sel Tam Ush Ver Wen Yor",
    "bask dane dric fax gard holt kesh lund mox nax quist rook stan thal vane wick",
)

NEEDLE = "The pass code of {name} is {code}."
LINK = "{name} holds the same pass code as {other}."

# The last of each is asked in evaluation only.
ONE = (
    "What is the pass code of {names}?",
    "Which pass code does {names} have?",
    "Which pass code opens {names}?",
)
ALL = (
    "What are all the pass codes of {names}?",
    "Which pass codes does {names} have?",
    "List every pass code of {names}.",
)
SEVERAL = (
    "What are the pass codes of {names}?",
    "Which pass codes do {names} have?",
    "List the pass codes of {names}, in this order.",
)
