"""Refusals say the truth, and a probe that cannot be judged is one."""

from __future__ import annotations

import pytest

from kvquilt.errors import UnsupportedModelError
from kvquilt.model.capability import inspect
from tests.models import build, tiny


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        (["chunked_attention", "full_attention", "chunked_attention"], "chunked_attention: not implemented here"),
        (["linear_attention", "full_attention", "mamba"], "linear_attention, mamba: linear or recurrent state"),
        (["linear_attention", "full_attention", "mystery"], "linear_attention, mystery: not implemented here"),
    ],
)
def test_layers_of_another_type_are_refused_with_the_true_reason(types: list[str], reason: str) -> None:
    hf = build("llama")
    object.__setattr__(hf.config, "layer_types", types)
    with pytest.raises(UnsupportedModelError, match=reason):
        inspect(hf)


@pytest.mark.parametrize("given", [[], [None], [None] * 4])
def test_layers_that_attend_past_our_function_are_refused(given: list[int | None]) -> None:
    with pytest.raises(UnsupportedModelError, match="attend by themselves"):
        tiny("llama")._expect_windows(given)


def test_one_lost_window_is_enough() -> None:
    """An eight-token probe is shorter than every window, so what attention was told is compared, not its result."""
    tiny("gemma3")._expect_windows([24, 24, None])
    for given in ([24, None, None], [24, 24, 24], [24, 25, None]):
        with pytest.raises(UnsupportedModelError, match="a window of"):
            tiny("gemma3")._expect_windows(given)
