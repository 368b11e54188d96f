"""Translation of command lines in the spelling of vLLM and other engines to that of jaxserve."""

import json
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.core.keywords import OtherName, nearest
from jaxserve.core.other_values import VALUES
from jaxserve.core.vllm_options import SHORT, takes_value, takes_values

BOOLEANS = {"true": True, "false": False}
NEGATIVE_NUMBER = re.compile(r"-\d.*")
BACKTICKS = re.compile(r"`(\w+)`")


class Speller:
    """Translates the arguments of one command, or those of a group before the name of a command."""

    def __init__(self, command: Any, context: Any):
        """Read the options of the command, and of which other engines it explains the options."""
        parameters = command.get_params(context)
        options = [each for each in parameters if each.param_type_name == "option"]
        self._own = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
        self._flags = {
            option.name: next((name for name in option.opts if name.startswith("--")), option.opts[0])
            for option in options
        }
        self._arguments = [each.name for each in parameters if each.param_type_name == "argument"]
        self._is_group = hasattr(command, "commands")
        self._others: Mapping[str, OtherName] = getattr(command.callback, "others", {})
        self.notices: list[str] = []

    def translate(self, args: Collection[str]) -> list[str]:
        """Return arguments in jaxserve's spelling, and keep `notices` of those that have no effect.

        Raise `ConfigError` for an option that is unknown or has no place here, with what to use instead.
        """
        rest, found = deque(args), list[list[str]]()
        last: list[str] = []  # the last of several values of an option, as in --api-key a b
        while rest:
            argument = rest.popleft()
            is_word = argument == "-" or not argument.startswith("-")
            if argument == "--" or (is_word and self._is_group):
                found.append([argument, *rest])
                break
            if is_word:
                found.append([argument])
                continue
            found += (parts := self._option(argument, rest))
            while self._others and rest and not rest[0].startswith("-"):
                if parts and self._is_repeatable(parts[-1][0]):
                    found.append(last := [parts[-1][0], rest.popleft()])
                elif takes_values(_key(_split(argument)[0])):  # without effect, as in --cudagraph-capture-sizes 1 2 4
                    last = ["", rest.popleft()]
                else:
                    break
        if last and self._lacks_argument(found):
            # As in --served-model-name NAME MODEL, with which jaxserve's own command lines may end.
            found = [*(part for part in found if part is not last), last[1:]]
        return list(chain.from_iterable(found))

    def _is_repeatable(self, flag: str) -> bool:
        return flag in self._own and self._own[flag].multiple

    def _lacks_argument(self, found: list[list[str]]) -> bool:
        words = [part for part in found if len(part) == 1 and not part[0].startswith("-")]
        return bool(self._arguments) and not words and not any(part[0] == "--config" for part in found)

    def _option(self, argument: str, rest: deque[str]) -> list[list[str]]:
        """Return an option with its values, some of which may be the next arguments in `rest`."""
        name, value = _split(argument)
        if name in self._own:
            return self._own_option(name, value, rest)
        key = _key(name)
        negated = key not in self._others and key.startswith("no_")
        key = key.removeprefix("no_") if negated else key
        if key in self._others:
            return self._other_option(name, key, value, negated, rest)
        if name.startswith("--"):
            raise ConfigError(f"no such option: {name}{self._nearest(name)}")
        return [[argument]]

    def _own_option(self, name: str, value: str | None, rest: deque[str]) -> list[list[str]]:
        option = self._own[name]
        if option.is_flag:
            if value is None:
                return [[name]]
            if value.lower() not in BOOLEANS:
                raise ConfigError(f"{name} is {value!r}: it must be true or false")
            chosen = option.opts if BOOLEANS[value.lower()] == (name in option.opts) else option.secondary_opts
            return [[each] for each in chosen[:1]]
        if value is None and not rest:
            return [[name]]
        if value is None:  # the value of --serve-args is a command line itself
            value = rest.popleft() if option.name.endswith("args") else self._next_value(name, rest)
        if option.name in VALUES and self._others:
            converted = VALUES[option.name](value)
            return [] if converted is None else [[name, str(converted)]]
        return [[name, value]]

    def _other_option(self, name: str, key: str, value: str | None, negated: bool, rest: deque[str]) -> list[list[str]]:
        other = self._others[key]
        if other.same and other.same in self._flags:
            flag = self._flags[other.same]
            on = BOOLEANS.get((value or "true").lower(), True) != negated
            if other.value is not None:
                return self._own_option(flag, str(other.value), rest) if on else []
            if self._own[flag].is_flag:
                return self._own_option(flag, str(on), rest)
            value = self._next_value(name, rest) if value is None and rest else value
            values = _parsed(value) if value and self._own[flag].multiple else value
            if isinstance(values, list):  # as in --allowed-origins '["https://example.org"]'
                return [[flag, str(each)] for each in values]
            return self._own_option(flag, value, rest)
        follows = rest and (not rest[0].startswith("-") or NEGATIVE_NUMBER.fullmatch(rest[0]))
        if value is None and follows and ((takes_value(key) and not negated) or rest[0].lower() in BOOLEANS):
            value = rest.popleft()
        if other.same in self._arguments and value is not None:
            return [[value]]
        if other.same:
            raise ConfigError(f"no such option: {name}: it is {flag_of(other.same)}, which this command does not have")
        meant = "a part" if "." in name else True if value is None else _parsed(value)
        if not other.accepts(not meant if negated else meant):
            if not other.ignored:
                raise ConfigError(f"no such option: {name}: {self.shown(other.reason)}")
            self.notices.append(f"{name} has no effect: {self.shown(other.reason)}")
        return []

    def _next_value(self, name: str, rest: deque[str]) -> str:
        """Return the next argument as the value of an option. Raise `ConfigError` if it is another option.

        So `--api-key $KEY --port 8000` does not make a key of `--port` where KEY is not set.
        """
        follows = _split(rest[0])[0]
        if follows.startswith("--") and (follows in self._own or _key(follows).removeprefix("no_") in self._others):
            raise ConfigError(f"{name} needs a value, and {follows} follows (or give it as {name}={follows})")
        return rest.popleft()

    def shown(self, reason: str) -> str:
        """Return the reason of an option of another engine with the names of options in their spelling here."""
        return with_flags(reason, self._flags)

    def _nearest(self, name: str) -> str:
        others = {
            key.replace("_", "-"): replace(other, same=self._flags.get(other.same, ""), reason=self.shown(other.reason))
            for key, other in self._others.items()
            if key not in self._flags  # such as reasoning_parser, which only the library explains
        }
        own = [each.removeprefix("--") for each in self._own if each.startswith("--")]
        return nearest(name.removeprefix("--"), own, others).replace("did you mean '", "did you mean '--")


def _split(argument: str) -> tuple[str, str | None]:
    """Return the name of an option, with dashes, and the value that is given with it, if any."""
    if argument.startswith("-O") and argument != "-O":  # as in -O3
        return "-O", argument[2:].lstrip("=")
    name, equals, value = argument.partition("=")
    return name.replace("_", "-"), value if equals else None


def _key(name: str) -> str:
    """Return the name in the tables of an option of another engine, as of -cc.mode or --compilation-config.mode."""
    stem = name.partition(".")[0]
    return SHORT.get(stem, stem.lstrip("-").replace("-", "_"))


def flag_of(name: str) -> str:
    """Return the long option with the name of a field or a keyword argument."""
    return "--" + name.replace("_", "-")


def with_flags(reason: str, flags: Mapping[str, str]) -> str:
    """Return the reason of an option of another engine with the names of options in their spelling here.

    `flags`: the long option of each parameter whose option does not have its name.
    """
    return BACKTICKS.sub(lambda found: flags.get(found[1]) or flag_of(found[1]), reason)


def others_about(word: str, others: Mapping[str, OtherName]) -> dict[str, OtherName]:
    """Return the options of other engines with a name, which may be a short one, or else with a word in their names."""
    stem = word.lstrip("-").replace("-", "_").replace(" ", "_")
    key = SHORT.get(f"-{stem}", stem)
    return (
        {key: others[key]} if key in others else {name: each for name, each in others.items() if stem.lower() in name}
    )


def _parsed(value: str) -> Any:
    """Return the value of an option: None, a truth value, a number, JSON, or the text as it is."""
    if value.lower() == "none":
        return None
    try:
        return json.loads(value.lower() if value.lower() in BOOLEANS else value)
    except ValueError:
        return value


# -- spellings that only `vllm bench` has

OBJECTIVE = re.compile(r"\w+:(p[\d.]+:)?[\d.]+")
CURRENT_FOLDER = "."


def translate_bench(args: Collection[str]) -> list[str]:
    """Repeat --goodput before each further objective, and add "." to a bare --save-result."""
    found: list[str] = []
    for argument in args:
        last = found[-1].replace("_", "-") if found else ""
        if last == "--save-result" and argument.startswith("-"):
            found.append(CURRENT_FOLDER)
        elif found[-2:-1] == ["--goodput"] and OBJECTIVE.fullmatch(argument):
            found.append("--goodput")
        # --dataset-name prefix_repetition is prefix-repetition here.
        names_dataset = last.replace("_", "-") in ("--dataset", "--dataset-name")
        found.append(argument.replace("_", "-") if names_dataset else argument)
    return [*found, CURRENT_FOLDER] if found[-1:] == ["--save-result"] else found
