"""The words of the invented library, of the project's own making: no module, class or exception is a real one."""

from __future__ import annotations

from kvquilt.evaluation.tasks.word_lists import joined, words

MODULES = joined("quar brin tolv mesk harn dovl pim stel vor gant", "nel dex uma ota ique osk")
VERBS = words("""
    fold scan weave prune merge blend trace lift bind sweep grind carve drain press shift wrap gauge braid patch sort
    """)
NOUNS = words("""
    ledger lattice ribbon harbor orchard basin thicket canopy furrow pebble lantern anvil spindle trellis gutter beacon
    """)
PARAMETERS = words("""
    depth grain span tint pace reach slack width pitch drift quota stride margin spread floor ceiling weight angle
    """)
SHADES = words("amber slate coral ivory olive russet indigo maroon ochre umber teal sienna khaki mauve fawn puce")
TRAITS = words("""
    Brittle Hollow Marble Silent Woven Gilded Frosted Crooked Tidal Velvet Copper Rugged Misty Nimble Sunken Painted
    """)
THINGS = words("""
    Arbor Bracket Cistern Dial Easel Flask Gable Hinge Ingot Jamb Kiln Ladle Mantle Notch Obelisk Pulley Quiver Rafter
    Sluice Tassel Urn Valve Wicket Yoke
    """)
# What it does, then how; {v} is the verb, {o} its object, {p} a parameter.
FIRST = (
    "This function can {v} a {o} in one pass.",
    "Use it to {v} every {o} of the source.",
    "It will {v} the {o} and leave the source alone.",
    "Callers {v} a {o} with it, piece by piece.",
)
SECOND = (
    "A larger {p} makes it slower, never wrong.",
    "The order of the pieces does not depend on {p}.",
    "With another {p} the result may be cached.",
    "Threads may share the result whatever {p} is.",
)
