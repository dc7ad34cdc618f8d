"""The words of the needle task: names, and the sentences and questions about them, of the project's own making."""

from __future__ import annotations

_HEADS = "Ar Bel Cor Dra Esk Fen Gor Hal Iv Jor Kel Lom Mir Nor Oth Pel Quor Ran Sel Tam Ush Ver Wen Yor"
_TAILS = "bask dane dric fax gard holt kesh lund mox nax quist rook stan thal vane wick"
NAMES = tuple(head + tail for head in _HEADS.split() for tail in _TAILS.split())

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
