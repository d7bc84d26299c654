"""What the command line says about a mistake, or of a result: with the nearest name that exists, and its options."""

import difflib
import inspect
import pkgutil
import re
from collections.abc import Iterable

__all__ = ["as_typed", "one_line", "suggest", "with_suggestion"]

# the innermost calls in a message, whose arguments are those of Python
_CALL = re.compile(r"[\w.]+\([^()]*\)")
_KEYWORD = re.compile(r"\b(\w+)=(\w+(?:[.-]\w+)*(?:\(\))?)?")
# a name of Python for an option of another name
_OTHERWISE = {"method": "methods"}


def one_line(message: str) -> str:
    """jsonargparse's report without the parts that name no mistake, on one line."""
    lines = [line.strip() for line in message.splitlines()]
    noise = re.compile(r"(Does not validate against any|Subtypes:|Errors:$|Given value( type)?:|$)")
    kept = [line for line in lines if not noise.match(line)]
    # among the complaints of a union, those about a plain string or null say nothing once there is another
    specific = [line for line in kept if not re.fullmatch(r"- Expected a <class '(str|NoneType)'>", line)]
    kept = specific if any(line.startswith("-") for line in specific) else kept
    text = " ".join(line.removeprefix("- ") for line in kept)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"Expected a (?:typing\.)?Literal\[(.*?)\]", r"Expected one of \1", text)
    given = re.search(r"Given value: (.{1,60})$", message, re.M)
    if given and "Expected " in text and given[1] not in text:
        text += f", not {given[1]}"
    # training's word "fit" is implied, never typed
    text = text.replace("fit.", "")
    return re.sub(r'Parser key "([^"]+)":', r"\1:", text)


def suggest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no known word is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def with_suggestion(message: str, options: Iterable[str]) -> str:
    """A parser's message, with the nearest option if it names an unknown one."""
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)'(?: is not accepted)?$", message)
    if unknown is None:
        return message
    word = unknown[1] or unknown[2]
    if owner := re.search(r"class_path '([\w.]+)'", message):
        # the parser has imported the class, and found no such argument
        return message + suggest(word, inspect.signature(pkgutil.resolve_name(owner[1])).parameters)
    group = re.search(r"Group '([\w.]+)'", message)
    prefix = f"{group[1]}." if group else ""
    known = [key.removeprefix(prefix) for key in options if key.startswith(prefix)]
    return message + suggest(word, known)


def as_typed(text: str, options: Iterable[str], fields: Iterable[str] = ()) -> str:
    """What the library says, in the words of a command whose problems are images.

    Its keywords become the command's options: ``target_acceptance=0.95`` is ``--target_acceptance 0.95``, and
    ``condition(..., noise=sd)`` is ``--noise sd``; other calls, and other keywords, stay.

    Args:
        text: one or more lines.
        options: names of the command's options.
        fields: names of its kernel's fields, the options ``--kernel.NAME``.
    """
    known = {name: f"--{name}" for name in options}
    known |= {name: known[other] for name, other in _OTHERWISE.items() if other in known}
    known = {name: f"--kernel.{name}" for name in fields} | known

    def option(found: re.Match[str]) -> str:
        name, value = found[1], (found[2] or "").removeprefix("dgm.").removesuffix("()")
        if name not in known:
            return found[0]
        return f"{known[name]} {value.lower() if value in ('True', 'False') else value}".rstrip()

    text = re.sub(r"\b(?:condition|sample|log_evidence)\(\.\.\., (\w+=[^()=]*(?:\(\))?)\)", r"\1", text)
    if "output_noise" in known:
        text = re.sub(r"\b(?:dgm\.)?WithNoise\(model, (?:sd=)?([\w.-]+)\)", r"output_noise=\1", text)
        text = text.replace("output_noise=...", "--output_noise SD")
    parts, end = [], 0
    for call in _CALL.finditer(text):
        if "=" in call[0]:
            parts += [_KEYWORD.sub(option, text[end : call.start()]), call[0]]
            end = call.end()
    text = "".join([*parts, _KEYWORD.sub(option, text[end:])])
    return re.sub(r"\bproblem(s?)\b(?!=)", r"image\1", text)
