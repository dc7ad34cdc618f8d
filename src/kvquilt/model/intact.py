"""Whether a model is as it was before anybody put something on it: nothing of a writer is left behind."""

from __future__ import annotations

from kvquilt.model.language_model import LanguageModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = ("transformers.", "accelerate.")  # these leave hooks that note or move tensors and alter none


def additions(model: LanguageModel) -> list[str]:
    """Hooks and replaced forwards that are on the model's modules now, each as ``module: what``.

    A forward puts what it needs on the model and takes it off again, so between two of them there is nothing.
    """
    found = []
    with model.alone():
        for name, module in model.hf.named_modules():
            hooks = [(kind, hook) for kind in _HOOKS for hook in vars(module)[kind].values()]
            foreign = [kind for kind, hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OWN)]
            if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
                foreign.append("forward")
            found += [f"{name or 'the model'}: {kind.strip('_')}" for kind in foreign]
    return found
