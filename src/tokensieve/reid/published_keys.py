"""Keys of the files that the authors of DeMo and SDTPS publish, which files of this project do not have.

Each is another name of a key, or says what is done here anyway, or belongs to a part that is not here. Such a part must be off;
the settings of one that is off are not used, and are reported once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator

from tokensieve.config.section import Problems, Section
from tokensieve.errors import short

# Switches as they are written in the field.
ON, OFF = ("yes", "on", "true", "1"), ("no", "off", "false", "0", "none", "nothing", "")
WORDS = dict.fromkeys(ON, True) | dict.fromkeys(OFF, False)


class PublishedSection(Section):
    """A section that also takes published keys."""

    fixed: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Published key -> the only value that is possible here, and what to do instead of another."""
    absent: ClassVar[Mapping[str, str]] = {}
    """Switch of a part that is not here -> what the part is."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Settings of such parts, and settings without an effect; a name that ends in _ stands for all that begin with it."""

    _unused_keys: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _read_published_keys(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(values, dict):
            return handler(values)
        kept, unused, problems = dict[Any, Any](), list[str](), list[str]()
        sources: dict[str, str] = {}  # key here -> the key that set it
        for key, value in values.items():
            if key in cls.fixed or key in cls.absent:
                wanted, advice = cls.fixed.get(key, (False, ""))
                if _meaning(value) != _meaning(wanted):
                    problems.append(f"{key}: {short(repr(value))}: {advice or _absent(cls.absent[key], key)}")
                if key in cls.absent:
                    unused.append(key)
            elif any(key == name or (name.endswith("_") and str(key).startswith(name)) for name in cls.unused):
                unused.append(key)
            else:
                name = cls.other_names.get(key, key)
                if name in kept and kept[name] != value:
                    problems.append(
                        f"{key}: {short(value)} and {sources[name]}: {short(kept[name])} contradict; give one of them"
                    )
                kept[name], sources[name] = value, key
        if problems:
            raise Problems(problems)
        made = handler(kept)
        made._unused_keys = tuple(unused)
        return made


def unused_note(sections: Iterable[tuple[str, Any]]) -> str:
    """A note that names the keys of the sections that are not used; "" if there are none."""
    keys = [f"{name}.{key}" for name, section in sections for key in getattr(section, "_unused_keys", ())]
    return f"{', '.join(keys)}: not used; these parts are off or not in tokensieve" if keys else ""


def _meaning(value: Any) -> Any:
    """A value as a switch where it can be one, else as it is: 'yes', True and 1 are the same."""
    return WORDS.get(str(value).strip().lower(), value)


def _absent(part: str, key: str) -> str:
    return f"tokensieve has no {part}; write {key}: False"
