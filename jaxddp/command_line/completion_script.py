"""Writes the script with which bash or zsh completes the words of `jaxddp`.

The script contains all words, so that completing a word starts no program.
"""

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jaxddp.choices import CHOICES
from jaxddp.command_line.short_forms import format_option, is_flag
from jaxddp.keys import SHORT
from jaxddp.recipe_files.find_recipe import config_names
from jaxddp.registry import AUGMENTATIONS, LOGGERS, METRICS

SHELLS = ("bash", "zsh")
_FILES, _FOLDERS, _RUNS = "@files", "@folders", "@runs"
"""Words of the function `_jaxddp_candidates` that stand for files, folders, and work directories of runs."""
_OF_PLACE = {"CONFIG": (*config_names(), _RUNS, _FILES), "RUN": (_RUNS, _FOLDERS), "DIR": (_FOLDERS,)}
"""The words that complete a positional argument, by its name in the usage. Others are files."""


@dataclass(frozen=True)
class CompletedCommand:
    """The words of a command.

    Attributes:
        options: the types of its options, by key.
        subcommands: the words that may follow its name, such as check and pack after data.
        place: the name of its first positional argument in the usage, such as CONFIG.
    """

    name: str
    options: Mapping[str, Any]
    subcommands: Sequence[str] = ()
    place: str = ""


def completion_script(shell: str, commands: Sequence[CompletedCommand]) -> str:
    """Return the script for a shell of `SHELLS`."""
    options = {key: hint for command in commands for key, hint in command.options.items()}
    flags = [key for key, hint in options.items() if is_flag(hint) and "." not in key]
    parts = {
        "COMMANDS": _printed([command.name for command in commands]),
        "SUBCOMMANDS": _cases((command.name, command.subcommands) for command in commands if command.subcommands),
        "OPTIONS": _cases((command.name, _options(command)) for command in commands),
        "VALUES": _cases(_values_of_options(commands)),
        "FLAGS": "|".join(map(format_option, flags)) or "--help",
        "PLACES": _cases((command.name, _OF_PLACE.get(command.place, (_FILES,))) for command in commands),
    }
    script = {"bash": _BASH, "zsh": _ZSH}[shell].replace("<CANDIDATES>", _CANDIDATES.strip())
    for name, text in parts.items():
        script = script.replace(f"<{name}>", text)
    return script.lstrip()


def _options(command: CompletedCommand) -> list[str]:
    short = [key for key, full in SHORT.items() if full in command.options and key not in command.options]
    return [*map(format_option, [*short, *command.options]), "--help"]


def _values_of_options(commands: Sequence[CompletedCommand]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the patterns of options with a list of values. An option of several commands may differ between them."""
    of_keys = dict[str, Sequence[str]]()
    for command in commands:
        for key, hint in command.options.items():
            if words := _values(key, hint):
                of_keys[f"*' {format_option(key)}'" if "." in key else f"'{command.name} {format_option(key)}'"] = words
    for short, key in SHORT.items():
        if (words := of_keys.get(f"*' {format_option(key)}'")) is not None:
            of_keys[f"*' {format_option(short)}'"] = words
    yield from of_keys.items()


def _values(key: str, hint: Any) -> list[str]:
    """Return the values of an option that can be listed: its choices, the names of a registry, true and false."""
    for registry in (*CHOICES, METRICS, AUGMENTATIONS, LOGGERS):
        if registry.key == key:
            return sorted(registry.keys_read())
    if is_flag(hint):
        return ["true", "false"]
    while typing.get_origin(hint) is not Literal:
        arguments = typing.get_args(hint)
        if not arguments or typing.get_origin(hint) not in (Annotated, typing.Union, type(int | None)):
            return []
        hint = arguments[0]
    return [*map(str, typing.get_args(hint))]


def _cases(cases: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return the cases of a `case` statement, each of which prints words."""
    return "\n".join(f"    {name}) {_printed(words)} ;;" for name, words in cases)


def _printed(words: Iterable[str]) -> str:
    return " ".join(["printf '%s\\n'", *words])


_CANDIDATES = r"""
# Print the words that may follow some words, one a line. $1 is the beginning of the completed word, and the others are
# the words before it.
_jaxddp_candidates() {
  local begin="$1" command="" first="" last="" word="" count=0
  shift
  for word in "$@"; do
    if [ "$word" = "=" ]; then
      continue
    elif [ "$word" = "--" ]; then
      # `jaxddp launch ... -- train CONFIG` contains another command.
      command="" first="" last="" count=0
      continue
    elif [ -z "$command" ]; then
      command="$word"
    else
      case "$word" in
        -*) ;;
        *)
          case "$last" in
            <FLAGS>|"" | [!-]*)
              count=$((count + 1))
              [ "$count" = 1 ] && first="$word" ;;
          esac ;;
      esac
    fi
    last="$word"
  done
  if [ -z "$command" ]; then
    <COMMANDS>
    return
  fi
  case "$begin" in
    -*) _jaxddp_options "$command"; return ;;
  esac
  case "$last" in
    <FLAGS>) ;;
    --*) _jaxddp_values "$command $last"; return ;;
  esac
  if [ "$count" = 0 ] && [ -n "$(_jaxddp_subcommands "$command")" ]; then
    _jaxddp_subcommands "$command"
  elif [ "$count" = 0 ]; then
    _jaxddp_places "$command"
  elif [ "$command $first" = "data show" ]; then
    _jaxddp_places train
  else
    printf '@files\n'
  fi
}

_jaxddp_subcommands() {
  case "$1" in
<SUBCOMMANDS>
  esac
}

_jaxddp_options() {
  case "$1" in
<OPTIONS>
  esac
}

_jaxddp_values() {
  case "$1" in
<VALUES>
    *) printf '@files\n' ;;
  esac
}

_jaxddp_places() {
  case "$1" in
<PLACES>
    *) printf '@files\n' ;;
  esac
}
"""
_BASH = r"""
# Completion of jaxddp in bash, written by `jaxddp completion bash`.

<CANDIDATES>

_jaxddp() {
  local begin="${COMP_WORDS[COMP_CWORD]}" line="" kind=""
  # bash takes = as a word of its own.
  [ "$begin" = "=" ] && begin=""
  COMPREPLY=()
  while IFS= read -r line; do
    case "$line" in
      @files) kind=f ;;
      @folders) kind=d ;;
      @runs)
        for line in "$begin"*/config.json runs/*/config.json; do
          line="${line%/config.json}"
          case "$line" in "$begin"*) [ -f "$line/config.json" ] && COMPREPLY+=("$line") ;; esac
        done ;;
      "$begin"*) COMPREPLY+=("$line") ;;
    esac
  done < <(_jaxddp_candidates "$begin" "${COMP_WORDS[@]:1:COMP_CWORD-1}")
  if [ -n "$kind" ]; then
    compopt -o filenames 2>/dev/null
    while IFS= read -r line; do
      COMPREPLY+=("$line")
    done < <(compgen "-$kind" -- "$begin")
  fi
}

complete -F _jaxddp jaxddp
"""
_ZSH = r"""
#compdef jaxddp
# Completion of jaxddp in zsh, written by `jaxddp completion zsh`.

<CANDIDATES>

_jaxddp() {
  setopt local_options null_glob
  local begin="${words[CURRENT]}" line="" kind=""
  local -a before=("${(@)words[2,CURRENT-1]}") found=()
  if [[ "$begin" == --*=* ]]; then
    before+=("${begin%%=*}")
    begin="${begin#*=}"
    compset -P '*='
  fi
  while IFS= read -r line; do
    case "$line" in
      @files) kind=f ;;
      @folders) kind=d ;;
      @runs) for line in *(/N) runs/*(/N); do [[ -f "$line/config.json" ]] && found+=("$line"); done ;;
      *) found+=("$line") ;;
    esac
  done < <(_jaxddp_candidates "$begin" "${before[@]}")
  (( ${#found} )) && compadd -a found
  [[ "$kind" == f ]] && _files
  [[ "$kind" == d ]] && _files -/
  return 0
}

# The file is either a function that zsh loads for the first completion, or it is sourced.
if [[ "${funcstack[1]}" == _jaxddp ]]; then _jaxddp "$@"; else compdef _jaxddp jaxddp; fi
"""
