"""`tokensieve completion`: scripts that let a shell complete commands, flags and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokensieve.cli.registry import COMMANDS, Command, Result, all_commands

SHELLS = ("bash", "zsh", "fish")
FILES = "<files>"  # among words: any file


@dataclass(frozen=True)
class Words:
    """What may follow a command: its flags with their help, the values of a flag, and the words without a flag."""

    help: str
    flags: dict[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)  # by flag; no entry: any file
    positional: tuple[str, ...] = ()


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar=f"{{{','.join(SHELLS)}}}", help="the shell that you type in")


def run_completion(args: argparse.Namespace) -> Result:
    script = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell](all_words())
    if not args.as_json:
        print(script, end="")
    return Result({"shell": args.shell, "script": script})


def all_words() -> dict[str, Words]:
    """What may follow each command."""
    from tokensieve.cli.parser import build_parser

    found = {}
    for name, command in all_commands().items():
        parser = build_parser(name)[1][name]
        flags: dict[str, str] = {}
        values: dict[str, list[str]] = {}
        positional: list[str] = []
        for action in parser._actions:
            words = _values(name, action)
            for flag in action.option_strings:
                flags[flag] = " ".join((action.help or "").replace("%%", "%").split())
                if action.nargs == 0:
                    values[flag] = []
                elif FILES not in words:
                    values[flag] = words
            positional += [] if action.option_strings else words
        found[name] = Words(command.help, flags, values, tuple(dict.fromkeys(positional)))
    return found


def _values(command: str, action: argparse.Action) -> list[str]:
    """The words that an argument takes; FILES where it takes a path, or anything."""
    from tokensieve.config import shipped
    from tokensieve.data.registry import DATASETS
    from tokensieve.methods.registry import REGISTRY
    from tokensieve.models.loading.registry import MODEL_TYPES
    from tokensieve.plan.mixes import MIXES
    from tokensieve.tasks.registry import TASKS

    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    name = action.dest
    if name in ("plan", "compare", "methods") or (command, name) == ("methods", "name"):
        mixes = MIXES if name in ("plan", "compare") else ()
        return [*mixes, *REGISTRY]
    if name == "dataset":
        return [spec.name for spec in DATASETS.values() if spec.name.startswith("embedded")]
    if name == "task":
        return list(TASKS)
    if name == "model_type":
        return list(MODEL_TYPES)
    if (command, name) == ("configs", "name"):
        return list(shipped.shipped())
    if command in ("train", "search", "validate") and name in ("words", "config", "files", "config_file"):
        return [*shipped.shipped(), FILES]
    return [FILES]


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _joined(words: Iterable[str]) -> str:
    return _quote(" ".join(word for word in words if word != FILES))


def _cases(words: dict[str, Words]) -> str:
    """The branches of a shell's `case "$command:$flag"`: `words`, and whether files may follow."""
    lines = []
    for name, of in words.items():
        together: dict[str, list[str]] = {}
        for flag, values in of.values.items():
            if values:
                together.setdefault(_joined(values), []).append(f"{name}:{flag}")
        lines += [f"    {'|'.join(patterns)}) words={values} files= ;;" for values, patterns in together.items()]
        switches = "|".join(f"{name}:{flag}" for flag, values in of.values.items() if not values)
        any_file = FILES in of.positional
        lines.append(f"    {name}:|{switches}) words={_joined(of.positional)} files={'yes' if any_file else ''} ;;")
    return "\n".join(lines)


def _flags(words: dict[str, Words]) -> str:
    return "\n".join(f"    {name}) words={_joined(of.flags)} ;;" for name, of in words.items())


def _walk(words: Sequence[str]) -> str:
    """The body of the functions of bash and zsh: `command`, and `flag`, the last one before the word."""
    return f"""    case $word in
      --) ;;
      -*) [[ -n $command ]] && flag=$word ;;
      *) [[ -z $command && " {" ".join(words)} " == *" $word "* ]] && command=$word ;;
    esac"""


def bash(words: dict[str, Words]) -> str:
    """For .bashrc: eval "$(tokensieve completion bash)"."""
    return f"""# bash completion of tokensieve
_tokensieve() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} command= flag= word words= files=yes i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{COMP_WORDS[i]}}
{_walk(list(words))}
  done
  if [[ -z $command ]]; then
    words={_joined([*words, "--help", "--version"])} files=
  elif [[ $cur == -* ]]; then
    files=
    case $command in
{_flags(words)}
    esac
  else
    case $command:$flag in
{_cases(words)}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ -n $files ]] && COMPREPLY+=($(compgen -f -- "$cur"))
}}
complete -o filenames -F _tokensieve tokensieve
"""


def zsh(words: dict[str, Words]) -> str:
    """For .zshrc, after compinit: source <(tokensieve completion zsh)."""
    return f"""#compdef tokensieve
# zsh completion of tokensieve
_tokensieve() {{
  local cur=${{words[CURRENT]}} command= flag= word list= files=yes i
  for ((i = 2; i < CURRENT; i++)); do
    word=${{words[i]}}
{_walk(list(words))}
  done
  if [[ -z $command ]]; then
    list={_joined([*words, "--help", "--version"])} files=
  elif [[ $cur == -* ]]; then
    files=
    case $command in
{_flags(words).replace(" words=", " list=")}
    esac
  else
    case $command:$flag in
{_cases(words).replace(" words=", " list=")}
    esac
  fi
  [[ -n $list ]] && compadd -- ${{=list}}
  [[ -n $files ]] && _files
}}
compdef _tokensieve tokensieve
"""


def fish(words: dict[str, Words]) -> str:
    """For ~/.config/fish/completions/tokensieve.fish."""
    lines = ["# fish completion of tokensieve"]
    for name, of in words.items():
        here = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c tokensieve -f -n __fish_use_subcommand -a {name} -d {_quote(of.help)}")
        for flag, help in of.flags.items():
            option = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            values = of.values.get(flag)
            takes = " -r" if values is None else f" -x -a {_joined(values)}" if values else ""
            lines.append(f"complete -c tokensieve {here} {option}{takes} -d {_quote(help[:60])}")
        if named := [word for word in of.positional if word != FILES]:
            lines.append(f"complete -c tokensieve {here} {'' if FILES in of.positional else '-f '}-a {_joined(named)}")
    return "\n".join(lines) + "\n"


COMMANDS.add(
    Command(
        "completion",
        "print a script that completes commands in a shell",
        "Print a script that lets a shell complete commands, flags, methods, data sets and shipped training files. bash: "
        'put eval "$(tokensieve completion bash)" into .bashrc. zsh: source <(tokensieve completion zsh) after compinit. fish: '
        "write it to ~/.config/fish/completions/tokensieve.fish. With --plugin the words of the plug-in are among them.",
        add_completion_flags,
        run_completion,
        order=120,
        examples=(
            "tokensieve completion bash",
            "tokensieve completion zsh",
            "tokensieve completion fish --plugin my_methods.py",
        ),
    ),
    origin=__name__,
)
