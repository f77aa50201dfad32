"""Hub repositories: what a name stands for, and which files of a repository it takes.

owner/name           config.json and *.safetensors where the repository has them, else the GGUF file that
                     comes first in PREFERENCE
owner/name:Q4_K_M    the GGUF file of this quantisation, in any case of letters
owner/name:FILE      the GGUF file of this name
owner/name@REV       the same of a branch, a tag or a commit, alone or before a variant: owner/name@REV:Q4_K_M
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from posixpath import basename
from typing import Final

from paceline.errors import PullError

FOLDER_PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
POOLING: Final = "1_Pooling/config.json"  # of a model for embeddings: the one file that stays in its folder
# About 4 bits first: what a pass reads decides its time, and fewer bits cost words.
PREFERENCE: Final = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1"),
    *("Q6_K", "Q8_0", "BF16", "F16", "F32", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
)
UNFINISHED: Final = ".partial"  # suffix of the folder of an unfinished pull
UNREADABLE: Final = ("IQ", "TQ", "Q4_0_", "NVFP4")  # how quantisations begin that no backend decodes

_PREFIXES: Final = ("hf://", "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_NAME: Final = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(@(?P<revision>\w[\w.+-]*(/\w[\w.+-]*)*))?"
    r"(:(?P<variant>\w[\w.+-]*))?",
    re.ASCII,
)
MAIN: Final = "main"  # the branch that a name without a revision stands for
_SLASH: Final = "%2F"  # of a revision, in the name of a folder
_QUANTISATION: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_(?:K|\d|XXS|XS|S|M|L|XL|NL))*|TQ\d_\d|(?:MX|NV)FP4(?:_MOE)?|BF16|FP?16|FP?32))"
    r"(?=$|[-._])",
    re.IGNORECASE,
)
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.ASCII)
_NOT_MODELS: Final = ("mmproj", "imatrix")  # a vision encoder, statistics: how names of such files begin


@dataclass(frozen=True, slots=True)
class HubName:
    repository: str  # owner/name
    variant: str = ""  # a quantisation, or a GGUF file's name; empty: the repository's own
    revision: str = ""  # a branch, a tag or a commit; empty: the main branch

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """None for what cannot be a name on a hub."""
        for prefix in _PREFIXES:
            text = text.removeprefix(prefix)
        match = _NAME.fullmatch(text)
        if match is None or match["repository"].endswith(".gguf") or text.endswith(UNFINISHED):
            return None
        variant, revision = match["variant"] or "", match["revision"] or ""
        return cls(
            match["repository"],
            "" if variant.lower() == "latest" else variant,
            "" if revision == MAIN else revision,
        )

    @classmethod
    def of_folder(cls, path: str) -> "HubName | None":
        """The name whose `folder` this is."""
        return cls.parse(path.replace(_SLASH, "/"))

    @property
    def folder(self) -> str:
        """OWNER/NAME of a path that no other name has."""
        owner, _, rest = str(self).partition("/")
        return f"{owner}/{rest.replace('/', _SLASH)}"

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.variant}" if self.variant else "")

    @property
    def short(self) -> str:
        """Without the owner, where there is little room."""
        return str(self).partition("/")[2]


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    path: str  # in the repository
    size: int
    digest: str  # SHA-256 of a large file, git's SHA-1 of a small one; empty where the hub gives none

    @property
    def name(self) -> str:
        """Its path on the disk, in the model's folder."""
        return self.path if self.path == POOLING else basename(self.path)


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of one model in a repository."""

    name: HubName  # in full: with the quantisation that was chosen
    files: tuple[RepositoryFile, ...]  # of a GGUF model its parts, in order

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def gguf(self) -> str:
        """The file to open; empty for a folder of safetensors."""
        return self.files[0].name if self.name.variant else ""


def quantisation(file: str) -> str:
    """As the name of a GGUF file tells it; empty where it tells none."""
    found = _QUANTISATION.findall(_stem(file))
    return re.sub(r"^FP", "F", found[-1].upper()) if found else ""


def select(name: HubName, files: Sequence[RepositoryFile]) -> Selection:
    """Raises a PullError that lists what there is where the name does not fit."""
    if not name.variant and (folder := _safetensors(files)):
        return Selection(name, folder)
    models = _gguf_models(name, files)
    if not models:
        raise PullError(
            f"{name.repository} holds no model: expected config.json and *.safetensors, or GGUF files"
        )
    chosen = _named(name, models) if name.variant else _preferred(name, models)
    if unreadable(chosen.name.variant):
        raise PullError(
            f"{chosen.name} cannot be run: {chosen.name.variant} is a quantisation that paceline does not "
            f"read; {_others(name, models)}"
        )
    return chosen


def preference(variant: str) -> tuple[int, str]:
    """A sort key: the first is taken where the user names none."""
    label = variant.removeprefix("UD-")
    rank = PREFERENCE.index(label) if label in PREFERENCE else len(PREFERENCE) + unreadable(label)
    return rank, variant


def unreadable(variant: str) -> bool:
    return variant.removeprefix("UD-").startswith(UNREADABLE)


def _safetensors(files: Sequence[RepositoryFile]) -> tuple[RepositoryFile, ...]:
    """Empty unless the repository holds such a model."""
    needed = tuple(
        file
        for file in files
        if file.path == POOLING
        or ("/" not in file.path and any(fnmatch(file.path, pattern) for pattern in FOLDER_PATTERNS))
    )
    whole = any(file.path == "config.json" for file in needed)
    return needed if whole and any(file.path.endswith(".safetensors") for file in needed) else ()


def _gguf_models(name: HubName, files: Iterable[RepositoryFile]) -> list[Selection]:
    """By preference. Where two files have one quantisation, both go by their file names."""
    groups: dict[str, list[RepositoryFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.name.lower().endswith(".gguf") and not file.name.lower().startswith(_NOT_MODELS):
            groups.setdefault(_stem(file.path), []).append(file)
    labels = {stem: quantisation(parts[0].name) or parts[0].name for stem, parts in groups.items()}
    counts = Counter(labels.values())
    models = [
        Selection(
            replace(name, variant=label if counts[label] == 1 else groups[stem][0].name), tuple(groups[stem])
        )
        for stem, label in labels.items()
    ]
    return sorted(models, key=lambda model: preference(model.name.variant))


def _stem(path: str) -> str:
    """Without the suffix and the number of the part: the same for all parts of a model."""
    stem = path[: -len(".gguf")] if path.lower().endswith(".gguf") else path
    part = _PART.fullmatch(stem)
    return part["stem"] if part else stem


def _named(name: HubName, models: Collection[Selection]) -> Selection:
    wanted = name.variant.lower()
    for model in models:
        if wanted in (model.name.variant.lower(), *(file.name.lower() for file in model.files)):
            return _whole(model)
    raise PullError(f"{name.repository} has no {name.variant}: {_others(name, models)}")


def _preferred(name: HubName, models: Sequence[Selection]) -> Selection:
    """Models that go by their file names differ in what only the user can know."""
    if len(models) > 1 and models[0].name.variant == models[0].gguf:
        raise PullError(f"{name.repository} has several models: {_others(name, models)}")
    return _whole(models[0])


def _whole(model: Selection) -> Selection:
    """Raises unless all parts of a split model are there, each once."""
    parts = [_PART.fullmatch(file.name[: -len(".gguf")]) for file in model.files]
    found = [(int(part["number"]), int(part["count"])) for part in parts if part]
    if found and found != [(number, len(found)) for number in range(1, len(found) + 1)]:
        raise PullError(
            f"{model.name} is split into {found[0][1]} parts, and the repository has {len(found)} of them: "
            "choose another file of it"
        )
    return model


def _others(name: HubName, models: Iterable[Selection]) -> str:
    usable = [model.name.variant for model in models if not unreadable(model.name.variant)]
    if not usable:
        return "nothing else is there; look for another repository of the model"
    example = replace(name, variant=usable[0])
    return f"run `paceline pull {example}`, or another of {', '.join(usable)}"
