"""The arms of a study of the repair budget, as they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.table import named
from kvquilt.evaluation.run.arms import AGAIN
from kvquilt.evaluation.tasks.item import Item
from kvquilt.repair.budget import Budget

NONE = "none"
STRUCTURE = (NONE, AGAIN)
INSERTED, RECOMPUTED, RECOMPUTED_LAST = "insert:target", "recompute:target", "recompute:target-last"
TARGETS = (NONE, INSERTED, RECOMPUTED, RECOMPUTED_LAST)
CONTEXT = (*TARGETS, f"full-in-order-of:{RECOMPUTED_LAST}", AGAIN)
CONTEXT_CLAIMS = ((RECOMPUTED, INSERTED), (RECOMPUTED, NONE), (INSERTED, NONE), (RECOMPUTED_LAST, RECOMPUTED))
_EPIC = "epic:k=1000000,"  # more first tokens than a document has: the budget alone says how many
_ALL_STEPS = 8  # others up to which each number of them is an arm


def share(budget: str) -> str:
    """The budget as methods write it.

    Raises:
        InputError: no budget.
    """
    return str(Budget.parse(budget))


def token_selectors(budget: str, seeds: int) -> dict[str, tuple[str, ...]]:
    """Candidates by name, each as the arms that stand for it: random rows are drawn several times."""
    candidates: dict[str, tuple[str, ...]] = {
        name: (f"{name}:{budget}",) for name in ("cacheblend", "infoflow", "prophetkv", "fusionrag")
    }
    candidates["epic"] = (f"{_EPIC}{budget}",)
    candidates["random"] = tuple(f"random:seed={seed},{budget}" for seed in range(seeds))
    return candidates


def called(arm: str) -> str:
    """An arm as tables and pictures call it: without a number that stands for none."""
    return f"epic:{arm.removeprefix(_EPIC)} (k by the budget)" if arm.startswith(_EPIC) else named(arm)


def moved(budget: str) -> str:
    """The retriever's best document next to the question: what the others are held against."""
    return f"retrieved-document:{budget}"


def budget_arms(budget: str, seeds: int, more: Sequence[str] = ()) -> tuple[str, ...]:
    """All of them, each once; `full` and `no-context` come with every run."""
    best, still = moved(budget), f"retrieved-document:{budget},order=given"
    reorder = f"infoflow-reorder:{budget}"
    documents = (best, still, f"attended:{still}", f"oracle:{best}", f"oracle:{still}", f"distractor:{still}")
    tokens = tuple(arm for arms in token_selectors(budget, seeds).values() for arm in arms)
    orders = (f"full-in-order-of:{best}", f"full-in-order-of:{reorder}")
    ends = (f"spread:{budget}", *more, "deranged:none", *orders, AGAIN)
    return tuple(dict.fromkeys((NONE, *documents, reorder, *tokens, *ends)))


def rivals(budget: str, chosen: str | None) -> dict[str, str]:
    """What the moved document is held against, by the name of the claim."""
    still = f"retrieved-document:{budget},order=given"
    found = {
        "the chosen token selector": chosen,
        "reordering by question attention": f"infoflow-reorder:{budget}",
        "the same document in place": still,
        "the document question attention finds": f"attended:{still}",
        "pure reuse": NONE,
    }
    return {name: arm for name, arm in found.items() if arm is not None}


def given_steps(items: Sequence[Item], seeds: int) -> dict[str, int]:
    """Arms that give full prefill's rows to more and more of the other documents: name -> how many.

    Raises:
        InputError: no item has another document than those that the answer rests on.
    """
    most = max(len(item.documents) - len(item.gold) for item in items)
    if most < 1:
        raise InputError("task", "attribution needs items with documents that the answer does not rest on")
    steps = range(1, most + 1) if most <= _ALL_STEPS else sorted({*(1 << n for n in range(most.bit_length())), most})
    return {f"insert:others={k},seed={seed}": k for seed in range(seeds) for k in steps}


def chosen_of(kl: Mapping[str, float], candidates: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, float]]:
    """The candidate with the least mean KL, and the mean of each; of equals the first.

    Args:
        kl: by arm.

    Raises:
        InputError: an arm without one.
    """
    if missing := [arm for arms in candidates.values() for arm in arms if arm not in kl]:
        raise InputError("tuning", "has no figure for an arm that is to be chosen from", missing[0])
    means = {name: sum(kl[arm] for arm in arms) / len(arms) for name, arms in candidates.items()}
    return min(means, key=lambda name: means[name]), means
