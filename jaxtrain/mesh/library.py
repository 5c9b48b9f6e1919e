"""The mesh files that come with jaxtrain, which go by their names."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.violations import did_you_mean

FOLDER = Path(__file__).parents[1] / "meshes"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def file_of(mesh: str | Path) -> str | Path:
    """The file of that name; any other path as it was given."""
    return FOLDER / f"{mesh}.toml" if str(mesh) in names() else mesh


def nearest(path: Path) -> str:
    """How an error about a file that is not there ends: with what may have been meant."""
    if path.stem in names():
        return f"; jaxtrain comes with a mesh of that name: give {path.stem!r} alone"
    if not path.suffix and path.name == str(path):
        if not (known := names()):
            return f", and {FOLDER} has none: is it a link that was not followed?"
        return f", and jaxtrain comes with none of that name{did_you_mean(path.name, known)}"
    beside = sorted(str(other) for other in path.parent.glob("*.toml"))
    return did_you_mean(str(path), beside) if beside else ""
