"""The help texts of Python's standard library, and what its code says about them for certain.

Both differ between Python's versions, and models know much of them by heart: the score without documents tells.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

from kvquilt.evaluation.tasks.api_library import Entry, Fact, literals
from kvquilt.evaluation.tasks.word_lists import words

# Written in Python, on every system, without effects when imported.
MODULES = words("""
    ast base64 bdb calendar cmd code codecs collections configparser contextlib copy dataclasses difflib dis
    doctest email.charset email.header email.message email.policy email.utils enum fileinput fnmatch fractions
    ftplib functools getpass glob graphlib gzip hmac html http.client http.cookiejar http.cookies http.server
    imaplib importlib.abc importlib.util inspect io ipaddress json json.encoder linecache locale logging
    logging.config logging.handlers mailbox mimetypes modulefinder ntpath optparse pathlib pickletools pkgutil
    platform plistlib poplib posixpath pprint queue random re runpy sched secrets selectors shelve shlex shutil
    smtplib socketserver statistics symtable tarfile tempfile textwrap threading timeit tokenize trace traceback
    types typing unittest.case unittest.loader unittest.mock urllib.parse urllib.request urllib.robotparser uuid
    warnings weakref webbrowser wsgiref.handlers wsgiref.headers wsgiref.util xml.dom.minidom
    xml.etree.ElementTree xml.sax.saxutils xmlrpc.client xmlrpc.server zipfile
    """)
_LEAST, _MOST = 60, 1200  # characters of a help text
_LONGEST = 300  # of a signature
_PLACES = ("first", "second", "third", "fourth", "fifth")
_GUESSED = (0, 1, -1, "")  # such defaults, truth values and None are right too often without looking
_RAISES = re.compile(r"\b[Rr]ais(?:es?|ed|ing)\s+(?:an?\s+|the\s+)?`{0,2}([A-Z]\w+)`{0,2}")
_RETURNS = re.compile(r"\b[Rr]eturns?\s+(?:an?\s+|the\s+)?(?:new\s+)?`{0,2}([A-Z]\w+)`{0,2}\s+(?:object|instance)\b")
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b")
_DENIED = re.compile(r"\b(?:no|not|never|without|instead)\b|n't\b")


@lru_cache(maxsize=1)
def stdlib() -> list[tuple[Entry, ...]]:
    """Every module's entries, of modules with a fact; a help text that several functions have stands once."""
    made, seen = [], set[str]()
    for name in MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modules that will go one day
            module = importlib.import_module(name)
        entries = []
        for qualified, function in _functions(module):
            entry = _entry(module, qualified, function)
            help_text = entry.text.partition("\n")[2] if entry else ""
            if entry and help_text not in seen:
                seen.add(help_text)
                entries.append(entry)
        if any(entry.facts for entry in entries):
            made.append(tuple(entries))
    return made


def _functions(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The module's own public functions and methods, by name; what others have put into it is not its own."""
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in sorted(public):
        held = getattr(module, name, None)
        if getattr(held, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(held):
            yield name, held
        elif inspect.isclass(held):
            for key, method in sorted(vars(held).items()):
                if not key.startswith("_") and inspect.isfunction(method) and method.__module__ == module.__name__:
                    yield f"{name}.{key}", method


def _entry(module: ModuleType, name: str, function: object) -> Entry | None:
    """None: it has no help text of a good length, or a signature that is not the same in every process and place."""
    help_text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    written = str(signature)
    here = " at 0x" in written + help_text or sys.executable in written
    if not _LEAST <= len(help_text) <= _MOST or len(written) > _LONGEST or here:
        return None
    facts = [*_defaults(signature), *_parameters(name, signature), *_named(module, help_text)]
    return Entry(module.__name__, name, f"{module.__name__}.{name}{written}\n\n{help_text}", tuple(facts))


def _defaults(signature: inspect.Signature) -> Iterator[Fact]:
    for parameter in signature.parameters.values():
        value = parameter.default
        if type(value) in (int, float, str, bytes) and value not in _GUESSED and len(repr(value)) <= 30:
            yield Fact("default", parameter.name, literals(value))


def _parameters(name: str, signature: inspect.Signature) -> Iterator[Fact]:
    """Names by place, from the second on; of functions, where nobody wonders whether ``self`` counts."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]
    if "." not in name and len(places) >= 3:
        for place, parameter in list(zip(_PLACES, places, strict=False))[1:]:
            yield Fact("parameter", place, (parameter,))


def _named(module: ModuleType, help_text: str) -> Iterator[Fact]:
    """The exception and the class that a help text names: a single one, said plainly, and one that the code knows."""
    sentences = re.split(r"(?<=[.;])\s+|\n\s*\n", help_text)
    plain = [sentence for sentence in sentences if not _DENIED.search(sentence)]
    raised = {found for sentence in plain for found in _RAISES.findall(sentence)}
    if len(raised) == 1 and set(_ERROR.findall(help_text)) <= raised:
        (exception,) = raised
        if _is_class(module, exception, BaseException):
            yield Fact("exception", "", (exception,))
    returned = {found for sentence in plain for found in _RETURNS.findall(sentence)}
    if len(returned) == 1:
        (made,) = returned
        if _is_class(module, made, object):
            yield Fact("returned", "", (made,))


def _is_class(module: ModuleType, name: str, of: type) -> bool:
    """Whether the name means such a class in the module or anywhere."""
    held = getattr(module, name, None) or getattr(importlib.import_module("builtins"), name, None)
    return inspect.isclass(held) and issubclass(held, of)
