"""Read the settings of a TRL script, YAML file or command line. Scripts are parsed, never executed.

A script with TrlParser or HfArgumentParser has its settings from a command line: the one that is
given, or the first one that the script documents.
"""

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verlite.config.problems import ConfigError, Problem
from verlite.convert.text import unexpanded
from verlite.files import check_yaml, one_line

TRAINERS = {name: name.lower() for name in ("GRPO", "RLOO", "PPO", "SFT", "DPO")}
PPO_FIELDS = ("num_ppo_epochs", "kl_coef", "cliprange", "response_length", "total_episodes")
CALLS = tuple(f"{name}{part}" for name in TRAINERS for part in ("Config", "Trainer"))

CONFIGS = tuple(name for name in CALLS if name.endswith("Config"))
PARSERS = ("TrlParser", "HfArgumentParser")
LITERALS = ("LoraConfig", "ModelConfig", "ScriptArguments")
"""Other calls whose literal arguments are settings. Those of LoraConfig have its name in front."""
VISION = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoProcessor")
"""Names in scripts that train on images."""
IMAGES = ("image", "images")
"""Names of their columns."""
QUANTIZED = ("quantization_config", "load_in_4bit", "load_in_8bit")
"""Arguments of from_pretrained that load a model with fewer bits."""
TEMPLATES = ("setup_chat_format", "clone_chat_template", "get_chat_template")
"""Functions of TRL and Unsloth that give a tokenizer another chat template."""
HARMLESS = {
    *("log", "evaluate", "save_model", "push_to_hub", "create_model_card"),
    *("_tag_names", "_name", "_paper"),
}
"""Parts of a trainer that a script may override without changing how it trains. Others that begin
with an underscore, such as _compute_loss, do change it."""
LOADED_AS = {"torch_dtype", "dtype", "device_map", "attn_implementation", "trust_remote_code"}
"""Arguments of from_pretrained that leave the weights as they are."""

Settings = dict[str, Any]
Words = Sequence[str]


@dataclass(frozen=True)
class Source:
    """What a file says.

    trainer: one of TRAINERS' values.
    settings: name -> value.
    words: the command line that the script documents. Empty: none.
    changed: what the script sets after it has read its command line.
    """

    trainer: str
    settings: Settings
    words: Words = ()
    changed: Settings = dataclasses.field(default_factory=dict)


class Computed(str):
    """The text of an expression whose value only running the script would give."""


def read_file(file: Path, words: Words = ()) -> Source:
    """Return what a script (.py) or YAML file says.

    words: the command line of a script with a parser.

    Raises:
        ConfigError: the file cannot be read, or has no configuration, or several.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, str(error)) from error
    return _script(file, text, words) if file.suffix == ".py" else _yaml(file, text)


def _yaml(file: Path, text: str) -> Source:
    try:
        check_yaml(text)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise _unreadable(file, one_line(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(file, "it must contain keys and values")
    settings = {str(key): _number(value) for key, value in content.items()}
    is_ppo = any(name in settings for name in PPO_FIELDS)
    return Source("ppo" if is_ppo else "grpo", settings)


def _number(value: Any) -> Any:
    """Return a number for text such as 1e-6, which YAML does not take for one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _script(file: Path, text: str, words: Words) -> Source:
    try:
        tree = ast.parse(text)
        own_classes = _subclasses(tree)
        calls, constants = list(_calls(tree, own_classes)), _constants(tree)
        parsed = _parsed(tree)
        changed = dict(_changed_later(tree, parsed))
        documented = _documented(ast.get_docstring(tree) or "", file.name)
        vision = next(_vision(tree), None)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise _unreadable(file, f"{where}{error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(file, f"it is not a script: {error}") from error
    names = {name for name, _ in calls} & set(CALLS)
    trainers = {TRAINERS[name.removesuffix("Config").removesuffix("Trainer")] for name in names}
    configs = [call.lineno for name, call in calls if name in CONFIGS]
    if not trainers:
        is_reward = bool(re.search(r"\bReward(Trainer|Config)\(", text))
        remedy = (
            "verlite trains no reward models: serve a trained one, and set reward.remote.url "
            "(docs/reward_service.md)."
        )
        rule = f"calls none of {', '.join(CALLS)}"
        raise ConfigError([Problem(str(file), None, rule, remedy if is_reward else "")])
    if len(trainers) > 1 or len(configs) > 1:
        lines = ", ".join(map(str, configs))
        rule = f"has several configurations (lines {lines}): keep one"
        raise ConfigError([Problem(str(file), None, rule)])
    if vision:
        rule = f"trains on images ({vision}); verlite trains on text"
        raise ConfigError([Problem(str(file), None, rule)])
    words = words or documented
    if parsed and not configs and not words:
        remedy = f"Give the values: verlite convert trl {file} -- --model_name_or_path MODEL ..."
        rule = "takes its settings from the command line, and documents none"
        raise ConfigError([Problem(str(file), None, rule, remedy)])
    own = next(_own_parts(tree, own_classes), None)
    if own:
        rule = "is a part of the script's own class, which verlite does not run"
        remedy = "Leave it out: give settings in the call of the configuration. docs/extending.md "
        remedy += "has the functions that verlite takes."
        raise ConfigError([Problem(own, None, rule, remedy)])
    settings: Settings = {}
    for name, call in calls:
        prefix = "LoraConfig." if name == "LoraConfig" else ""
        settings |= {
            key if key.startswith("**") else prefix + key: value
            for key, value in _arguments(name, call, constants)
        }
    if isinstance(settings.get("model_init_kwargs"), dict):
        options = settings["model_init_kwargs"]
        settings |= {field: options[field] for field in QUANTIZED if field in options}
    settings |= dict(_around(tree, calls, own_classes, constants))
    # What the script takes from the parsed arguments is what the command line says.
    settings = {
        key: value
        for key, value in settings.items()
        if not (isinstance(value, Computed) and value.split(".")[0] in parsed)
    }
    from_model_args = parsed or any(name == "ModelConfig" for name, _ in calls)
    for field, function in (
        ("peft_config", "get_peft_config("),
        ("quantization_config", "get_quantization_config("),
    ):
        if function in str(settings.get(field)) and from_model_args:
            del settings[field]  # use_peft and load_in_4bit say whether there is one
    has_lora = any(name == "LoraConfig" for name, _ in calls)
    if isinstance(settings.get("peft_config"), Computed) and not has_lora:
        rule = "is computed by the script"
        remedy = "Write LoraConfig(...) with its values, or leave it out."
        raise ConfigError([Problem("peft_config", settings["peft_config"], rule, remedy)])
    return Source(trainers.pop(), settings, words if parsed else (), changed)


def _vision(tree: ast.AST) -> Iterator[str]:
    """Yield the names of a script that say it trains on images."""
    for node in ast.walk(tree):
        found = getattr(node, "id", None) or getattr(node, "attr", None)
        if isinstance(node, ast.alias):
            found = node.name
        if isinstance(found, str) and found in VISION:
            yield found
        for name in _columns(node):
            if isinstance(name, ast.Constant) and name.value in IMAGES:
                yield name.value


def _columns(node: ast.AST) -> Sequence[ast.expr | None]:
    """Return where a node has names of columns: row["image"], row.get("image"), {"image": ...} and
    ["image"], but no paths and other texts."""
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.Dict):
        return [*node.keys, *node.values]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return node.elts
    is_get = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get"
    return node.args if is_get and isinstance(node, ast.Call) else []


def _parsed(tree: ast.AST) -> set[str]:
    """Return the variables that get what a parser of PARSERS read from the command line."""
    if not any(name in ast.unparse(tree) for name in PARSERS):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ".parse_args" in ast.unparse(node.value):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                names |= {ast.unparse(part) for part in parts}
    return names


def _documented(text: str, name: str) -> list[str]:
    """Return the first command line for a script in its docstring, or []."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.search(rf"{re.escape(name)}\s+-", line):
            try:
                return shlex.split(line.strip().strip("`"), comments=True)
            except ValueError:
                return []
    return []


def _subclasses(tree: ast.AST) -> dict[str, str]:
    """Return the script's own classes of trainers -> the trainer of CALLS."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in (ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases):
                if known.get(base, base) in CALLS:
                    known[node.name] = known.get(base, base)
    return known


def _own_parts(tree: ast.AST, classes: dict[str, str]) -> Iterator[str]:
    """Yield the parts, as Class.name, with which `classes` that the script uses change a trainer or
    the defaults of a configuration."""
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {id(base) for node in defined for base in node.bases}
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases
    }
    for node in sorted(defined, key=lambda node: -node.lineno):  # a class before its bases
        if node.name not in classes or node.name not in used:
            continue
        used |= {ast.unparse(base) for base in node.bases}
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [part.name]
            else:
                targets = getattr(part, "targets", [getattr(part, "target", None)])
                names = [ast.unparse(target) for target in targets if target is not None]
            is_trainer = classes[node.name].endswith("Trainer")
            for name in names:
                if not (is_trainer and name in HARMLESS):
                    yield f"{node.name}.{name}"


def _around(
    tree: ast.AST,
    calls: Sequence[tuple[str, ast.Call]],
    classes: dict[str, str],
    constants: Settings,
) -> Iterator[tuple[str, Any]]:
    """Yield what a script sets outside of a configuration: how the policy is loaded, the chat
    template, and the checkpoint that the training begins with.

    classes: the script's own names of trainers -> the trainer.
    """
    assigned = _assigned(tree)
    for load in _loads(calls, assigned):
        for field, value in _arguments("", load, constants):
            values = assigned.get(str(value), []) if isinstance(value, Computed) else []
            if values:
                value = Computed(" or ".join(map(ast.unparse, values)))
            if field in QUANTIZED or field.startswith("**"):
                yield field, value
    guarded = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.If) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr == "chat_template":
                    text = _value(node.value, constants)
                    is_always = id(node) not in guarded and text is not None
                    yield "chat_template", text if is_always else Computed(ast.unparse(node.value))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        if name in TEMPLATES:
            yield "chat_template", Computed(ast.unparse(node))
        if name == "train" and isinstance(node.func, ast.Attribute):
            owners = assigned.get(ast.unparse(node.func.value), [node.func.value])
            is_trainer = any(_name(owner, classes) in CALLS for owner in owners)
            given = [word.value for word in node.keywords if word.arg == "resume_from_checkpoint"]
            for value in given or (node.args[:1] if is_trainer else []):
                yield "resume_from_checkpoint", _value(value, constants)


def _name(call: ast.expr, classes: dict[str, str]) -> str:
    """Return the name of what is called, the trainer's for one of the script's own; "" if nothing
    is."""
    name = ast.unparse(call.func).rsplit(".", 1)[-1] if isinstance(call, ast.Call) else ""
    return classes.get(name, name)


def _assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the expressions that each variable gets, by itself or as a part of a tuple."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                found.setdefault(ast.unparse(part), []).append(node.value)
    return found


def _loads(
    calls: Sequence[tuple[str, ast.Call]], assigned: dict[str, list[ast.expr]]
) -> Iterator[ast.Call]:
    """Yield the calls of from_pretrained that load the model that a trainer gets."""
    left: list[ast.expr] = []
    for name, call in calls:
        if name.endswith("Trainer"):
            left += call.args[:1] + [word.value for word in call.keywords if word.arg == "model"]
    seen: set[int] = set()
    while left:
        for node in ast.walk(left.pop()):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, ast.Name):
                left += assigned.get(node.id, [])
            elif isinstance(node, ast.Call) and "Model" in ast.unparse(node.func):
                if ast.unparse(node.func).endswith(".from_pretrained"):
                    yield node


def _calls(tree: ast.AST, classes: dict[str, str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name, call) of each configuration and trainer, in the order of the lines.

    classes: the script's own names of trainers -> the trainer.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node, classes)
            if name in CALLS or name in LITERALS:
                found.append((node.lineno, name, node))
    for _, name, node in sorted(found, key=lambda item: item[0]):
        yield name, node


def _constants(tree: ast.AST) -> Settings:
    """Return the literals of variables that are bound once in the file, by an assignment. One may
    be another one, or load the model that another one names. A dict or list is a literal only if
    it does nothing but be an argument by name or behind **: anything else may change it."""
    assigned: dict[str, ast.expr] = {}
    bound: list[str] = []
    arguments = {
        id(word.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
    }
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            assigned |= {ast.unparse(target): node.value for target in node.targets}
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.append(ast.unparse(node))
        elif isinstance(node, ast.Name | ast.Attribute) and id(node) not in arguments:
            used.add(ast.unparse(node))
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
    once = {name: node for name, node in assigned.items() if bound.count(name) == 1}
    constants: Settings = {}
    for _ in range(3):  # a model's name, the model, and what is made of it
        values = {name: _value(node, constants) for name, node in once.items()}
        constants = {
            name: value
            for name, value in values.items()
            if not isinstance(value, Computed)
            and not (isinstance(value, dict | list) and name in used)
        }
    return constants


def _changed_later(tree: ast.AST, parsed: set[str]) -> Iterator[tuple[str, Computed]]:
    """Yield (field, text) of each `config.field = ...`, where `config` is a configuration.

    parsed: variables from the command line, which may be configurations.
    """
    configs = parsed | {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if ast.unparse(node.value.func).rsplit(".", 1)[-1] in CONFIGS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in configs:
                yield node.attr, Computed(f"{ast.unparse(node)} = ...")


def _arguments(name: str, call: ast.Call, constants: Settings) -> Iterator[tuple[str, Any]]:
    positional = {
        "Config": ("output_dir",),
        "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
        "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset"),
        "Trainer": ("model", "reward_funcs", "args"),
    }
    kinds = next((names for end, names in positional.items() if name.endswith(end)), ())
    for field, node in [
        *zip(kinds, call.args, strict=False),
        *((None, arg.value) for arg in call.args if isinstance(arg, ast.Starred)),
        *((k.arg, k.value) for k in call.keywords),
    ]:
        if isinstance(node, ast.Starred):
            continue
        if field is None:
            unpacked = _value(node, constants)
            if isinstance(unpacked, dict):
                yield from unpacked.items()
            else:
                yield f"**{ast.unparse(node)}", Computed(ast.unparse(node))
        elif field != "args":
            yield field, _value(node, constants)


def _value(node: ast.expr, constants: Settings) -> Any:
    text = ast.unparse(node)
    if text in constants:
        return constants[text]
    if isinstance(node, ast.Call) and text.split("(")[0].endswith(".from_pretrained"):
        if node.args and {word.arg for word in node.keywords} <= LOADED_AS:
            return _value(node.args[0], constants)
    if text.startswith("dict(") and isinstance(node, ast.Call) and not node.args:
        named = {word.arg: _value(word.value, constants) for word in node.keywords}
        return Computed(text) if None in named else named
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Computed(text)
    return value if _is_plain(value) else Computed(text)


def _is_plain(value: Any) -> bool:
    """Return whether YAML could have the value: not `...`, which stands for anything."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, str | int | float)


def program(words: Words) -> tuple[str | None, Path | None, list[str]]:
    """Return (trainer, script, arguments) of a command line of `trl` or of a script.

    `trl grpo --beta 0`, `accelerate launch ... grpo.py --beta 0` and `--beta 0` are such lines. A
    script's trainer is the one in its name, if there is one.
    """
    for place, word in enumerate(words):
        if word.endswith(".py"):
            parts = re.split(r"[^a-z]+", Path(word).stem.lower())
            named = next((name for name in TRAINERS.values() if name in parts), None)
            return named, Path(word), list(words[place + 1 :])
        if word in TRAINERS.values() and place and words[place - 1].endswith("trl"):
            return word, None, list(words[place + 1 :])
    return None, None, list(words)


def arguments(words: Words) -> Settings:
    """Return the settings of a command line in the form of transformers' HfArgumentParser.

    Values are numbers, true or false, JSON, or text; several after one name are a list. The file of
    --config comes first.

    Raises:
        ConfigError: a word is not an option, or the file cannot be read.
    """
    settings: Settings = {}
    name = ""
    values: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, attached = word.lstrip("-").replace("-", "_").partition("=")
            values[name] = [word.partition("=")[2]] if equals else []
        elif word.strip() and name:
            values[name].append(word)
        elif word.strip():
            raise ConfigError([Problem(word, None, "is not an option", "Options begin with --.")])
    file = values.pop("config", [])
    if file:
        settings |= read_file(Path(file[0])).settings
    for name, given in values.items():
        rule = unexpanded(given)
        if rule:
            raise ConfigError([Problem(f"--{name}", None, rule)])
        if not given and name.startswith("no_"):
            settings[name.removeprefix("no_")] = False
        else:
            found = [_typed(word.rstrip(",") if len(given) > 1 else word) for word in given]
            settings[name] = found[0] if len(found) == 1 else found or True
    return settings


def _typed(word: str) -> Any:
    """Return a number, true, false, null or JSON for a word that is one, else the word."""
    if not re.fullmatch(r"[-+.\deE]+|(?i:true|false|null)|\{.*\}|\[.*\]", word):
        return word
    try:
        return _number(yaml.safe_load(word))
    except yaml.YAMLError:
        return word


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem(str(file), None, f"cannot be read: {why}")])
